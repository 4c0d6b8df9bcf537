"""Models that can be trained here, and their sizes: names to specs, without torch, and
specs to modules.

vit-base, vit-huge, gpt2-large and qwen2.5-3b are the catalog's entries, so that a run
and a simulation share one vocabulary; the tiny ones have the same parts and train in
seconds on a CPU.
"""

from __future__ import annotations

import re
from dataclasses import fields, replace
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from madmax_lib import catalog
from madmax_lib.base import parse_fields
from madmax_lib.catalog import Transformer

if TYPE_CHECKING:
    from madmax_lib.runs.model.network import Network

_TINY = catalog.table("run_models").groupby("name", sort=False)
# sizes that follow from others, worked out again when one of those changes
_DERIVED = {
    "kv_heads": ("heads",),
    "head_dim": ("hidden", "heads"),
    "v_head_dim": ("hidden", "heads", "head_dim"),
    "expert_ffn": ("ffn",),
}
MODELS = (*_TINY.groups, "vit-base", "vit-huge", "gpt2-large", "qwen2.5-3b")


def name(text: str) -> str:
    """Canonical name of a spelling: GPT_Tiny is gpt-tiny. Raises ValueError with the
    nearest names.

    >>> name("ViT_Huge")
    'vit-huge'
    """
    plain = re.sub(r"[\s_]+", "-", text.strip().lower())
    if plain in MODELS:
        return plain
    near = get_close_matches(plain, MODELS, n=3, cutoff=0.0)
    raise ValueError(f"no model {text!r} to run; nearest: {', '.join(near)}")


def spec(text: str, **sizes) -> Transformer:
    """Sizes of a model, with some of them changed.

    sizes: fields of `Transformer`, such as layers=2. Raises ValueError for an unknown
    name, field, or sizes that do not fit together.

    >>> spec("gpt2-large").parameters, spec("gpt2-large", layers=2).layers
    (774030080, 2)
    """
    canonical = name(text)
    names = [field.name for field in fields(Transformer) if field.name != "name"]
    if unknown := sorted(set(sizes) - set(names)):
        near = ", ".join(get_close_matches(unknown[0], names, n=3, cutoff=0.0))
        raise ValueError(
            f"{unknown[0]!r} is not a size of {canonical}; nearest: {near}"
        )
    model = _tiny(canonical) if canonical in _TINY.groups else catalog.model(canonical)
    # 0 makes `Transformer` work a size out from the others
    derived = {
        field: 0 for field, sources in _DERIVED.items() if set(sources) & set(sizes)
    }
    if model.image:
        derived["sequence"] = 0
        if "sequence" in sizes:
            raise ValueError(f"sequence of {canonical} follows from image and patch")
    return replace(model, **derived | sizes)


@lru_cache(maxsize=len(_TINY))
def _tiny(name):
    """Model of data/run_models.csv."""
    texts = _TINY.get_group(name).set_index("field")["value"].to_dict()
    return Transformer(name, **parse_fields(Transformer, texts, name))


def build(
    text: str,
    *,
    seed: int = 0,
    device: str = "cpu",
    attention: str = "flash",
    weights: str | Path = "",
    **sizes,
) -> Network:
    """The whole model on one device: tokens (B, S) to logits (B, S, V), or images (B,
    3, H, W) to logits (B, classes).

    Every parameter is drawn from a generator seeded by `seed` and the parameter's name,
    so that a stage or a shard of the model holds the numbers of the whole. attention:
    flash, or unfused with the scores in memory.
    weights: directory of published ones, see `weights.Weights`.
    """
    # late: names and sizes are wanted where torch is not
    from madmax_lib.runs.model.network import Network
    from madmax_lib.runs.model.weights import Weights

    model = Network(spec(text, **sizes), attention=attention)
    published = Weights(weights, model.spec) if weights else None
    return model.materialise(seed, device, published)
