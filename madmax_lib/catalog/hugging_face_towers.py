"""The tower of a model of images and text, and the projector behind it, by the rows of
`data/towers.csv`.

A cell is a number, or keys of the tower's configuration and after | their default.
positions: rows of a learned table, `grid` for one per patch. vectors: of the width of
the tower, beside its layers: norms at the ends, a class token. widths: of the products
between tower and decoder, where `merged` patches make one token.
"""

from itertools import pairwise

from madmax_lib.base.fields import require_int
from madmax_lib.catalog.data_files import table
from madmax_lib.catalog.models import Transformer

# norms of as many channels as a merged token has, of LayerNorm: two of four widths
_PROJECTOR_VECTORS = 8


def tower_fields(kind: str, config: dict, hidden: int) -> dict:
    """Fields of a model with a tower of such a `vision_config`; none for a kind that is
    not known.

    hidden: channels of the decoder. Raises ValueError for what is no size.
    """
    rows = table("towers").to_dict("records")
    rows = [row for row in rows if kind in row["kind"].split()]
    if not rows:
        return {}
    row = rows[0]

    def size(name):
        keys, _, default = row[name].rpartition("|")
        values = [config[key] for key in keys.split() if config.get(key) is not None]
        value = values[0] if values else default
        value = len(value) if isinstance(value, list) else value
        return require_int(f"vision_config {name}", int(value))

    width = size("hidden")
    patch = size("patch")
    image = size("image") // patch * patch
    patches = (image // patch) ** 2
    positions = patches if row["positions"] == "grid" else size("positions")
    merged = size("merge") ** 2
    more = size("more_projectors")
    has_bias = size("bias")
    tower = Transformer(
        f"{kind} tower",
        hidden=width,
        sequence=patches,
        image=image,
        patch=patch,
        norm=row["norm"],
        positions="none",
        attention_bias="all" if has_bias else "none",
        mlp_bias=has_bias,
        **{name: size(name) for name in ("layers", "heads", "ffn", "gated")},
    )
    pixels = size("frames") * 3 * patch**2  # three colours
    ends = (pixels + size("patch_bias") + positions + size("vectors")) * width
    named = {
        "hidden": width,
        "merged": merged * width,
        "projected": config["projected"],
        "out": hidden,
    }
    widths = [named.get(word) or int(word) for word in row["widths"].split()]
    bias = size("projector_bias")
    projector = sum((inputs + bias) * outputs for inputs, outputs in pairwise(widths))
    projector = (1 + more) * projector + more * _PROJECTOR_VECTORS * width
    # what the tower counts at its ends is in the projector's sum
    counted = tower.embedding_parameters + tower.norm_parameters
    return {
        "tower": tower,
        "projector_parameters": projector + ends - counted,
        "merged_patches": merged,
    }
