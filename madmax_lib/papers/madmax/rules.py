"""Strategies and rules of the MAD-Max model.

As its public release applies them [Hsia et al., ISCA 2024, arXiv 2310.02784] (behaviour
recorded). Where the release differs from what one would expect, `MadmaxRules` has a
switch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

INTRA = "intra-node"
GLOBAL = "global"
# Two elements are "inside a node, across nodes". The last strategy is ours: the release
# has fsdp as the first element only.
STRATEGIES = (
    "ddp",
    "tp",
    "fsdp",
    "tp,ddp",
    "ddp,tp",
    "fsdp,tp",
    "fsdp,ddp",
    "tp,fsdp",
)
# names for two classes of layers at once, as the paper's sweeps write them
_TOGETHER = {"mlp": ("bottom", "top"), "transformer": ("attention", "fc")}


@dataclass(frozen=True)
class MadmaxRules:
    """Switches where the public release has a defect or a choice; the defaults are the
    release.

    >>> MadmaxRules(schedule="optimised").stray_gather
    True

    schedule: of the backward pass of LLM and ViT. "pre-optimised" gathers weights just
        in time, "optimised" one layer ahead, "released" is pre-optimised for LLM and
        optimised for ViT. DLRM has one schedule.
    stray_gather: the optimised backward pass starts with an AllGather also without
        fsdp.
    sharded_ddp: in "tp,ddp" and "fsdp,ddp" the gradient AllReduce carries the shard W/n
        instead of the full W.
    blocking_fc: in DLRM-Transformer the AllReduce of an FC's input gradient blocks the
        attention below.
    """

    schedule: str = "released"  # pre-optimised for LLM, optimised for ViT
    stray_gather: bool = True  # a defect: 447 ms of a ViT-10B step on 128 GPUs
    sharded_ddp: bool = False  # 20 of 20 rows of the cloud sheet need the full W
    blocking_fc: bool = False

    def __post_init__(self):
        if self.schedule not in ("released", "pre-optimised", "optimised"):
            raise ValueError(
                f"schedule={self.schedule!r} is not released, pre-optimised or "
                "optimised"
            )


_CORRECTED = MadmaxRules(stray_gather=False, sharded_ddp=True, blocking_fc=True)
_NAMED = {"released": MadmaxRules(), "corrected": _CORRECTED}


class Element(NamedTuple):
    """One level of a strategy: ddp, tp or fsdp over `degree` ranks inside a node or
    across nodes.
    """

    kind: str
    degree: int
    level: str


Strategy = tuple[Element, ...]  # from the inside of a node outwards


def parse_rules(rules: str | MadmaxRules) -> MadmaxRules:
    """Rules by name, "released" or "corrected"; `MadmaxRules` pass through."""
    if isinstance(rules, MadmaxRules):
        return rules
    if rules not in _NAMED:
        raise ValueError(f"rules={rules!r} is not released, corrected or MadmaxRules")
    return _NAMED[rules]


def _parse_strategy(text, num_devices, num_nodes):
    """Elements of a strategy such as "fsdp" or "tp,ddp": one over all devices, or
    inside a node and across nodes.

    >>> [tuple(element) for element in _parse_strategy("TP, DDP", 128, 16)]
    [('tp', 8, 'intra-node'), ('ddp', 16, 'global')]
    """
    kinds = str(text).replace(" ", "").lower()
    if kinds not in STRATEGIES:
        raise ValueError(
            f"dense_strategy={text!r} is not one of {'; '.join(STRATEGIES)}"
        )
    if num_devices % num_nodes:
        raise ValueError(
            f"num_devices={num_devices} is not a multiple of num_nodes={num_nodes}: the "
            "degrees of a strategy must multiply to the device count"
        )
    if "," not in kinds:
        # one element spans all N devices and always pays for the network
        return (Element(kinds, num_devices, GLOBAL),)
    # "s1,s2": s1 over the n = N/q GPUs of a node, s2 over the q nodes
    inside, across = kinds.split(",")
    return (
        Element(inside, num_devices // num_nodes, INTRA),
        Element(across, num_nodes, GLOBAL),
    )


def parse_classes(
    text: str, classes: Sequence[str], num_devices: int, num_nodes: int
) -> dict[str, Strategy]:
    """Elements of each class of dense layers: one strategy for all, or one per class as
    in the paper's sweeps.

    Classes are bottom, top (together mlp), attention, fc (together transformer).

    >>> split = parse_classes("mlp=tp,ddp; attention=ddp", ["top", "attention"], 128, 16)
    >>> {name: [element.kind for element in split[name]] for name in split}
    {'top': ['tp', 'ddp'], 'attention': ['ddp']}
    """
    if "=" not in str(text):
        return dict.fromkeys(classes, _parse_strategy(text, num_devices, num_nodes))
    split = {}
    for part in filter(str.strip, text.split(";")):
        name, _, strategy = (piece.strip().lower() for piece in part.partition("="))
        members = [one for one in _TOGETHER.get(name, (name,)) if one in classes]
        if not members:
            raise ValueError(
                f"dense_strategy={text!r}: {name!r} is not one of the layer classes "
                f"{', '.join(classes)}"
            )
        elements = _parse_strategy(strategy, num_devices, num_nodes)
        split |= dict.fromkeys(members, elements)
    if missing := [one for one in classes if one not in split]:
        raise ValueError(
            f"dense_strategy={text!r} says nothing of the layer class(es) "
            f"{', '.join(missing)}"
        )
    return split
