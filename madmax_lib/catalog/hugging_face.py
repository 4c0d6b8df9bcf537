"""Which model does a Hugging Face `config.json` describe? A `Transformer`, by the keys
in `data/hugging_face.csv`.

A kind takes the rows of the kind that it is `like`, and puts its own in their place.
How it stacks layers of several kinds is told by `hugging_face_stacks`; what no stack
says is refused with the reason.
"""

import json
import warnings
from pathlib import Path

import pandas as pd

from madmax_lib.base.fields import parse_fields, require_int, short_repr
from madmax_lib.catalog.hugging_face_stacks import STACKED, of_mamba_ssm, stacked
from madmax_lib.catalog.models import Transformer

__all__ = ["read_config"]

# tokens; longer contexts come from a short last phase [Llama 3, arXiv 2407.21783,
# 3.4.2]
_LONGEST_TRAINED = 65_536
_PLAIN = {
    "decoder_sparse_step": [1],
    "mlp_only_layers": [[]],
    "use_sliding_window": [False],
    "moe_layer_freq": [1],
    "interleave_moe_layer_step": [1],
}
_SIZES = {
    "layers": "num_hidden_layers num_layers n_layer",
    "hidden": "hidden_size d_model n_embd",
}
_SIZES |= {
    "heads": "num_attention_heads num_heads n_head",
    "ffn": "intermediate_size d_ff",
    "vocab": "vocab_size",
}
_REFUSED = {  # what no stack of blocks says
    "an encoder with biases, positions and norms of its own": "bart mbart pegasus whisper marian",
    "layers that share weights": "zamba zamba2",
    "state-space and attention side by side in a layer": "falcon_h1",
    "linear attention or convolutions": "qwen3_next minimax kimi_linear lfm2",
}


def read_config(path: Path, rows: pd.DataFrame) -> Transformer:
    """The model of a configuration file; of a model of images and text its text part,
    with a warning.

    rows: model_type (several with blanks between), field, key (several: the first that
    is there), default. Raises ValueError with the reason for a kind that is not known
    or cannot be said, FileNotFoundError without a file.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: no such file; give a config.json of Hugging Face, or a name of "
            "mm.models()"
        )
    try:
        config = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    if not isinstance(config, dict):
        raise ValueError(
            f"{path}: no configuration of a model, which is an object of JSON"
        )
    name = config.get("_name_or_path")
    if isinstance(config.get("ssm_cfg"), dict):
        config = of_mamba_ssm(path, config)
    if config.get("model_type") == "siglip" and isinstance(
        config.get("vision_config"), dict
    ):
        warnings.warn(
            f"{path}: the image part alone is read, without the text beside it",
            stacklevel=3,
        )
        config = config["vision_config"] | {"model_type": "siglip_vision_model"}
    elif isinstance(config.get("text_config"), dict):
        warnings.warn(
            f"{path}: the text part alone is read, without what sees or hears",
            stacklevel=3,
        )
        config = {"model_type": config.get("model_type"), **config["text_config"]}
    kind = config.get("model_type", "")
    by_kind = _by_kind(rows)
    if not isinstance(kind, str) or kind not in by_kind:
        known = f"model_type {kind!r} is not one of {', '.join(by_kind)}"
        reason = next(
            (why for why, kinds in _REFUSED.items() if str(kind) in kinds.split()), ""
        )
        why = f"{kind} has {reason}, which is not modelled" if reason else known
        raise ValueError(f"{path}: {why}; {_own(config)}")
    read = {key for key, _ in by_kind[kind].values()}
    for key, plain in _PLAIN.items():
        if key not in read and config.get(key) not in (None, *plain):
            raise ValueError(
                f"{path}: {key}={config[key]!r}: layers of several kinds are not "
                f"modelled; {_own(config)}"
            )
    values = {
        field: _value(path, config, *of_field)
        for field, of_field in by_kind[kind].items()
    }
    if values.get("mixer_rank") == "auto":
        values["mixer_rank"] = str(-(-int(values["hidden"]) // 16))
    shape = parse_fields(Transformer, values, str(path))
    if shape.get("positions", "learned") != "learned":
        shape["sequence"] = _trained_sequence(config, shape["sequence"])
    shape["ffn"] = shape["ffn"] or (0 if kind in STACKED else 4 * shape["hidden"])
    if shape.get("image") and shape.get("patch"):  # a rest of pixels is left aside
        shape["image"] -= shape["image"] % shape["patch"]
    shape["attention_bias"] = (
        shape.get("attention_bias", "all").replace("1", "all").replace("0", "none")
    )
    shape["full_every"] = (
        _full_every(path, config, shape.get("full_every", 0))
        if shape.get("window")
        else 0
    )
    try:
        shape |= (
            stacked(kind, config, shape)
            if kind in STACKED
            else _beside(kind, config, shape)
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}; {_own(config)}") from None
    folder = path.parent.name if path.stem == "config" else ""
    return Transformer(name or folder or path.stem, **shape)


def _own(config: dict) -> str:
    """How to describe a model that no configuration says, with the sizes that this one
    has.
    """
    sizes = {
        field: next((config[key] for key in keys.split() if key in config), "...")
        for field, keys in _SIZES.items()
    }
    given = ", ".join(
        f"{field}={short_repr(value).strip(chr(39))}" for field, value in sizes.items()
    )
    return (
        "describe what comes nearest: "
        f"madmax_lib.catalog.models.Transformer('mine', {given}, sequence=...)"
    )


def _by_kind(rows: pd.DataFrame) -> dict[str, dict[str, tuple[str, str]]]:
    """Key and default by field of each kind, with those of the kinds that it is like;
    these stand above it.
    """
    kinds: dict[str, dict[str, tuple[str, str]]] = {}
    for names, field, key, default in rows[
        ["model_type", "field", "key", "default"]
    ].itertuples(index=False):
        for kind in names.split():
            own = kinds.setdefault(kind, {})
            own.update(kinds[default] if field == "like" else {field: (key, default)})
    return kinds


def _value(path: Path, config: dict, key: str, default: str) -> str:
    given = [config[name] for name in key.split() if config.get(name) is not None]
    if not given and not default:
        raise ValueError(f"{path}: field {key!r} is missing")
    value = given[0] if given else default
    if isinstance(value, dict) and "id2label" in key:
        return str(len(value))
    zero = (
        not default and value == 0 and not isinstance(value, bool)
    )  # of what every such model has
    if (
        isinstance(value, (dict, list))
        or zero
        or (isinstance(value, (int, float)) and not 0 <= value < 2**62)
    ):
        raise ValueError(f"{path}: {key}={short_repr(value)} is no size")
    return str(int(value) if isinstance(value, bool) else value)


def _trained_sequence(config: dict, positions: int) -> int:
    """Tokens per sample of the pre-training, 0 where positions are those of a long
    context that was added later.
    """
    scaling = config.get("rope_scaling")
    key = "original_max_position_embeddings"
    original = config.get(key) or (scaling.get(key) if isinstance(scaling, dict) else 0)
    return (
        require_int(key, original)
        if original
        else (positions if positions <= _LONGEST_TRAINED else 0)
    )


def _full_every(path: Path, config: dict, every: int) -> int:
    """Every layer of this number attends to all tokens, 0 for none; told by
    `layer_types` where it is there.
    """
    types = config.get("layer_types")
    if not types:
        return every
    full = [number for number, name in enumerate(types, 1) if name == "full_attention"]
    every = full[0] if full else 0
    if full != list(range(every, len(types) + 1, every)) if every else full:
        raise ValueError(
            f"{path}: layer_types: full attention in layers {full} is not every "
            f"n-th; {_own(config)}"
        )
    return every


def _beside(kind: str, config: dict, shape: dict) -> dict:
    """Parameters and flags that no key tells alone [the modelling files of
    transformers].
    """
    hidden = shape["hidden"]
    heads = require_int("num_attention_heads", shape["heads"], 1)
    width = shape.get("head_dim") or hidden // heads
    if kind == "bert":  # types of tokens and the pooler
        types = require_int("type_vocab_size", config.get("type_vocab_size", 2))
        return {"other_parameters": types * hidden + hidden * (hidden + 1)}
    if kind in ("vit", "dinov2"):
        return _of_images(kind, config, hidden)
    if (
        kind == "siglip_vision_model"
    ):  # a head that pools by attention; no class token, which the count has
        if not config.get("vision_use_head", True):
            raise ValueError("vision_use_head=False is not modelled")
        ffn = shape["ffn"]
        pooling = (
            hidden
            + 4 * hidden * (hidden + 1)
            + 2 * hidden
            + 2 * hidden * ffn
            + ffn
            + hidden
        )
        return {"other_parameters": pooling - 2 * hidden}
    if kind in ("gemma2", "gemma3_text", "gemma3"):
        return {
            "other_layer_parameters": 2 * hidden
        }  # norms behind attention and feed-forward part
    if kind == "olmo2":
        return {
            "other_layer_parameters": (heads + shape.get("kv_heads", heads)) * width
        }  # norms of whole q and k
    if kind == "glm4_moe" and shape["attention_bias"] == "all":
        return {"attention_bias": "qkv"}
    if (
        shape.get("kv_lora_rank") and shape["attention_bias"] == "all"
    ):  # of the products down to latents and the last
        down = (
            shape.get("q_lora_rank", 0) + shape["kv_lora_rank"] + shape["rope_head_dim"]
        )
        return {"attention_bias": "none", "other_layer_parameters": down + hidden}
    if kind == "qwen2_moe":
        return _shared_expert(config, shape)
    return {}


def _of_images(kind: str, config: dict, hidden: int) -> dict:
    """Of DINOv2 a mask token, scales of both branches and the ratio of its feed-forward
    part; biases of both kinds.
    """
    plain = config.get("qkv_bias", True)
    fields = {} if plain else {"attention_bias": "none"}
    scales = 0 if plain else hidden  # the projection has a bias
    if kind == "vit":
        return fields | {"other_layer_parameters": scales}
    ffn = hidden * require_int("mlp_ratio", config.get("mlp_ratio", 4), 1)
    if config.get("use_swiglu_ffn"):
        fields |= {"gated": True, "ffn": (ffn * 2 // 3 + 7) // 8 * 8}
    return {
        "ffn": ffn,
        "other_parameters": hidden,
        "other_layer_parameters": scales + 2 * hidden,
    } | fields


def _shared_expert(config: dict, shape: dict) -> dict:
    """Of Qwen2-MoE: as wide as several experts, with a gate."""
    width = require_int(
        "shared_expert_intermediate_size",
        config.get("shared_expert_intermediate_size", 5632),
    )
    if width % shape["expert_ffn"] or shape["moe_every"] > 1:
        sizes = (
            f"shared_expert_intermediate_size={width} and "
            f"moe_intermediate_size={shape['expert_ffn']}"
        )
        raise ValueError(
            f"{sizes}: a shared expert of no multiple, or of some layers alone, is "
            "not modelled"
        )
    return {
        "shared_experts": width // shape["expert_ffn"],
        "other_layer_parameters": shape["hidden"],
    }
