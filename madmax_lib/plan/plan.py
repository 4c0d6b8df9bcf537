"""The plan that splits a model: one `Plan` for runs and simulations, with a text form.

World = dp x tp x pp x cp; experts (ep) are laid over dp x cp and divide it, or with etp
over dp x cp x tp / etp. The text form names what differs from the default:
`dp2.tp8.pp4.z1.mb2.full` is Plan(dp=2, tp=8, pp=4, zero=1, micro_batch=2,
recompute="full").
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import pandas as pd

from madmax_lib.base import require_int, short_repr
from madmax_lib.catalog import Cluster, Model, data_file
from madmax_lib.plan.case import Case
from madmax_lib.plan.columns import Plans
from madmax_lib.plan.layout import layout_chunks, layout_text
from madmax_lib.plan.rule import ZERO_PLUS
from madmax_lib.plan.rules import ALONE, BATCH, check_plan, enforce

# parts of the text form: words, their fields and values, N for a number
_PARTS = pd.read_csv(data_file("plan_words.csv"))
_IS_NUMBER = _PARTS["value"] == "N"
_NUMBERS = dict(_PARTS.loc[_IS_NUMBER, ["word", "field"]].to_numpy())
_PERCENT = {"capacity": 100}  # a whole number in the text form
# a field's own name may stand for the short one: micro_batch=2 is mb2
_TYPED = _NUMBERS | {n: n for n in _NUMBERS.values() if n not in _PERCENT}
_HABITS = {  # words of others, and what they are here
    "ddp": "dpN",
    "fsdp": "dpN.z3",
    "hsdp": "dpN.hsN.z3",
    "deepspeed": "dpN.z1 to dpN.z3",
}
_TEXTS = {"recompute-": "recompute", "layout-": "layout"}  # before parts joined by +
_IS_FILE = re.compile(r"\.(ya?ml|json|toml|ini|sh|py|log|txt|csv|md)$", re.IGNORECASE)
_CONSTANTS = {"True": True, "False": False, "inf": math.inf}
_WORDS = {  # field and value of each word
    word: (name, _CONSTANTS.get(value, value))
    for word, name, value in _PARTS[~_IS_NUMBER].to_numpy()
}


def is_file_name(text: str) -> bool:
    """Whether a text that should be a plan reads like a path.

    >>> is_file_name("dp2.z3"), is_file_name("runs/job.yaml")
    (False, True)
    """
    return _IS_FILE.search(text) is not None


@dataclass(frozen=True)
class Plan(Plans):
    """The split of one training step: degrees and choices, in the order and at the
    defaults of the text form.

    >>> Plan(dp=4, tp=2, zero=1) == Plan.parse("dp4.tp2.z1")
    True

    dp, tp, pp, cp: data, tensor, pipeline and context parallel degrees (default 1).
    ep: devices of dp x cp x tp / etp over which experts are laid (default 1).
    etp: tensor parallel degree of experts; 1 lays whole experts over tp too (default 0:
        tp).
    zero: states that data parallelism shards: 0 none (DDP), 1 optimizer, 2 and
        gradients, 3 and parameters (default 0).
    micro_batch: samples per device and micro-batch (default 1).
    recompute: what the backward pass computes again: none, selective (attention's
        core), full, or modules of Megatron-Core joined by +: core_attn, moe_act,
        layernorm, mla_up_proj, mlp, moe, shared_experts; or budgetN, torch's memory
        budget: N % of what a layer keeps beyond its input is kept (default none).
    sequence_parallel: tp also splits what lies between its products (default None: with
        tp > 1).
    interleave: model chunks per pipeline stage (default 1).
    schedule: of the pipeline: gpipe, 1f1b, zero-bubble, zbv or dualpipev, of which the
        last two have two chunks per stage (v2) (default 1f1b).
    offload: states off the device: None, optimizer, all, chunks or nvme (default None).
    prefetch: layers that FSDP gathers ahead (default 1).
    bucket_bytes: size of a DDP bucket in bytes, infinite (`one-bucket`) for one
        reduction at the end (default 25 MiB).
    shard: devices that ZeRO shards over, with copies across (HSDP) (default 0: all of
        dp x cp).
    qwz, hpz, qgz: ZeRO++'s 8-bit gather of weights, second shard inside the node, 4-bit
        exchange of gradients; `zpp` is all three [arXiv 2306.10209] (default False).
    overlap_gather: ZeRO-1/2 gathers parameters beside the next forward pass, not after
        the optimizer (default False).
    reduce_fp32: gradients are reduced in fp32 (default False).
    context: how cp exchanges keys and values: ring or ulysses (default ring).
    attention: flash computes the causal half of the scores, unfused all of them,
        through memory (default flash).
    first_layers, last_layers: layers of the first and last pipeline stage, of whose
        chunks the very first and very last are shorter (default 0: as the others).
    layout: layers of every chunk in the pipeline's order, joined by +, for stages of any
        length [Megatron-LM]: 3+2x29+1m is 3, 29 times 2, and one with an MTP layer m
        behind it (default empty: as the other fields say).
    embedding_as_layer, head_as_layer: they count as a layer when stages are made equal
        [Megatron-LM] (default False).
    capacity: tokens an expert takes over its even share; as text in percent, cap125 is
        1.25 (default 0: all that come).
    lora_rank: of the adapters that are trained beside frozen weights [LoRA, arXiv
        2106.09685] (default 0: all weights are trained).
    overlap_tp, overlap_ep, overlap_dp: what runs beside compute: communication of tp,
        exchanges of tokens (DualPipe, batch overlap), reductions of gradients, which
        ZeRO-3 always hides (default None: as the software does).

    Parts of the text form: dpN tpN ppN cpN epN etpN; zN zero, mbN micro_batch, vN
    interleave, hsN shard, pfN prefetch, capN capacity, firstN and lastN layers, loraN
    rank, bucketN bytes, one-bucket; selective or full recompute, or of modules, as in
    recompute-moe_act+mlp, or recompute-budget50; layout-3+2x29+1m; sp, nosp; gpipe, zb,
    zbv, dualpipev; ulysses; unfused; qwz, hpz, qgz, zpp; overlap-gather, reduce-fp32;
    embedding-layer, head-layer; overlap-tp, overlap-ep, overlap-dp, no-overlap-tp,
    no-overlap-ep, no-overlap-dp; offload-optimizer, offload-all, offload-chunks,
    offload-nvme.

    Raises ValueError naming the field, its value and the rule (`rules.ALONE`).
    See also: mm.search, mm.estimate, mm.RunSpec.

    >>> plan = Plan(dp=2, tp=8, pp=8, recompute="full")
    >>> str(plan), plan.world_size, plan.sequence_parallel
    ('dp2.tp8.pp8.full', 128, True)
    >>> Plan(dp=4, ep=3)
    Traceback (most recent call last):
    ValueError: ep=3 does not divide dp x cp = 4 x 1
    """

    def __post_init__(self):
        for name, value in vars(self).items():
            if isinstance(value, np.generic):
                object.__setattr__(self, name, value.item())
        chunks = layout_chunks(str(self.layout))
        object.__setattr__(self, "layout", layout_text(chunks))
        enforce(ALONE, self, None)
        if self.recomputes_modules:
            modules = "+".join(sorted({*self.recompute.split("+")}))
            object.__setattr__(self, "recompute", modules)
        super().__post_init__()

    @classmethod
    def parse(cls, text: str | Plan) -> Plan:
        """Plan from its text form, in which degrees may be left out; a Plan stays what
        it is.

        Blanks or commas may stand for points, and a field's own name with or without
        `=` for the short one.

        >>> Plan.parse("dp2.tp2.z3").world_size, str(Plan.parse("dp=2, tp=2, zero3, micro_batch=4"))
        (4, 'dp2.tp2.z3.mb4')
        """
        if isinstance(text, Plan):
            return text
        parts = re.split(r"[.,\s]+", text.lower()) if isinstance(text, str) else []
        # an empty text is a variable that nobody set rather than a plan of one rank
        if not any(parts):
            raise ValueError(
                f"plan={short_repr(text)} must be a Plan or its text, such as dp2.tp2.z3"
            )
        if is_file_name(text):
            raise ValueError(
                f"plan={text!r} is a file's name, and a plan is a text such as "
                "dp2.tp2.z3; search's like= and plan_flags.read take configurations"
            )
        values = {}
        for part in filter(None, parts):
            stated = cls._parse_part(part, text)
            for name in stated:
                if name in values and part != "zpp":
                    raise ValueError(f"{name} is given twice in plan {text!r}")
            values |= stated
        return cls(**values)

    @staticmethod
    def _parse_part(part, text):
        """Fields that a part of a plan's text names."""
        if part == "zpp":
            return dict.fromkeys(ZERO_PLUS, True)
        if part in _WORDS:
            name, value = _WORDS[part]
            return {name: value}
        for prefix, name in _TEXTS.items():
            if part.startswith(prefix):
                return {name: part.removeprefix(prefix)}
        match = re.fullmatch(r"([a-z_]+)=?([0-9]+)", part, re.ASCII)
        if match and match[1] in _TYPED:
            name = _TYPED[match[1]]
            value = int(match[2])
            return {name: value / _PERCENT[name] if name in _PERCENT else value}
        numbers = ", ".join(f"{short}N" for short in _NUMBERS)
        near = difflib.get_close_matches(part, [*_WORDS, "zpp"], n=2) or ["full"]
        hint = f" such as {' or '.join(near)}"
        for habit, way in _HABITS.items():
            if habit in part:
                hint = f"; {habit} is {way}"
                break
        raise ValueError(
            f"{part!r} in plan {text!r} is not one of {numbers}, or a word of "
            f"help(mm.Plan){hint}; parts are joined as in dp2.tp8.z1.full"
        )

    def __str__(self):
        default = DEFAULTS | {"sequence_parallel": self.tp > 1}
        parts = [f"dp{self.dp}"]
        for short, name in _NUMBERS.items():
            value = getattr(self, name)
            # an infinite bucket has a word of its own
            if name != "dp" and value not in (default[name], math.inf):
                parts.append(f"{short}{round(value * _PERCENT.get(name, 1))}")
        for word, (name, value) in _WORDS.items():
            if getattr(self, name) == value != default[name]:
                parts.append(word)
        if self.recomputes_modules or self.budget < 1:
            parts.append(f"recompute-{self.recompute}")
        if self.layout:
            parts.append(f"layout-{self.layout}")
        return ".".join(parts)

    def micro_batches(self, global_batch: int) -> int:
        """Micro-batches per step and pipeline, the last one perhaps short
        (`last_micro_batch`).

        Raises ValueError when the batch cannot be split.
        """
        batch = _Batch(require_int("global_batch", global_batch, 1))
        enforce(BATCH, self, batch)
        return -(-batch.global_batch // (self.dp * self.micro_batch))  # rounded up

    def last_micro_batch(self, global_batch: int) -> int:
        """Samples per device of the last micro-batch."""
        others = self.micro_batches(global_batch) - 1
        return global_batch // self.dp - others * self.micro_batch

    def check(
        self,
        model: Model,
        cluster: Cluster | None,
        global_batch: int | None = None,
        sequence: int | None = None,
    ) -> None:
        """Raises ValueError, in the field's words, if the plan cannot be laid over
        model, cluster and batch.

        cluster, global_batch: not judged if None; sequence: the model's own if None.
        Rules: those of `rules`.
        """
        check_plan(Case(model, cluster, self, global_batch, sequence))


@dataclass(frozen=True)
class _Batch:
    """The part of a case that the rules of a batch look at."""

    global_batch: int


def plans_of(
    plan_or_table: Plan | str | Sequence[Plan | str] | pd.DataFrame,
) -> tuple[Plans, pd.Index | None]:
    """The plan, or the plans of a list or table with their index.

    A table's column `plan` holds plans or their texts; other columns change what they
    say, and those that are no fields, as in the table of a search, then do not count.
    Raises ValueError as `Plan.parse` and `Plans.from_table`.
    """
    table = plan_or_table
    if isinstance(table, (list, tuple)):
        table = pd.DataFrame({"plan": table})
    if not isinstance(table, pd.DataFrame):
        return Plan.parse(table), None
    if "plan" in table.columns and table.columns.is_unique:
        plans = [Plan.parse(plan) for plan in table["plan"]]
        stated = [name for name in table if name in DEFAULTS]
        columns = {
            name: [getattr(plan, name) for plan in plans]
            for name in DEFAULTS
            if name not in stated
        }
        table = table[stated].assign(**columns)
    return Plans.from_table(table), table.index


# of every choice that a plan does not name
DEFAULTS = {field.name: field.default for field in fields(Plan)}
