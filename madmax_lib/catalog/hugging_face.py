"""A `Transformer` from a Hugging Face `config.json`, by the keys in
`data/hugging_face.csv`.

A kind takes the rows of the kind that it is `like`, and puts its own in their place.
`hugging_face_stacks` reads stacks of several kinds of layers; what no stack says is
refused with the reason.
"""

import json
import warnings
from pathlib import Path

import pandas as pd

from madmax_lib.base.fields import parse_fields, require_int, short_repr
from madmax_lib.catalog.hugging_face_stacks import (
    STACKED,
    of_mamba_ssm,
    size_of,
    stacked,
)
from madmax_lib.catalog.models import Transformer

# tokens; longer contexts come from a short last phase [Llama 3, arXiv 2407.21783,
# 3.4.2]
_LONGEST_TRAINED = 65_536
# values of keys with which all layers are of one kind
_UNIFORM = {
    "decoder_sparse_step": [1],
    "mlp_only_layers": [[]],
    "use_sliding_window": [False],
    "moe_layer_freq": [1],
    "interleave_moe_layer_step": [1],
}
# keys of a size, whatever the kind
_SIZES = {
    "layers": "num_hidden_layers num_layers n_layer",
    "hidden": "hidden_size d_model n_embd",
    "heads": "num_attention_heads num_heads n_head",
    "ffn": "intermediate_size d_ff",
    "vocab": "vocab_size",
}
_REFUSED = {  # what no stack of blocks says
    "an encoder with biases, positions and norms of its own": "bart mbart pegasus "
    "whisper marian",
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
            f"{path}: no such file; give a Hugging Face config.json, or a name of "
            "mm.models()"
        )
    try:
        config = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path}: not a model configuration (a JSON object)")
    folder = path.parent.name if path.stem == "config" else ""
    name = config.get("_name_or_path") or folder or path.stem
    if isinstance(config.get("ssm_cfg"), dict):
        config = of_mamba_ssm(path, config)
    config = _trained_part(path, config)
    try:
        return Transformer(name, **_fields(config, rows, str(path)))
    except _UnmodelledError as error:
        raise ValueError(f"{path}: {error}; {_nearest_call(config)}") from None


class _UnmodelledError(ValueError):
    """Layers that no `Transformer` describes: the message shows what comes nearest."""


def _trained_part(path, config):
    """The image part of SigLIP, the text part of others that have several."""
    kind = config.get("model_type")
    if kind == "siglip" and isinstance(config.get("vision_config"), dict):
        part = config["vision_config"] | {"model_type": "siglip_vision_model"}
        left_out = "only the image part is read, not the text part"
    elif isinstance(config.get("text_config"), dict):
        part = {"model_type": kind, **config["text_config"]}
        left_out = "only the text part is read, not the vision or audio parts"
    else:
        return config
    warnings.warn(f"{path}: {left_out}", stacklevel=4)  # at the user's mm.model
    return part


def _fields(config, rows, where):
    """Fields of the `Transformer` of a configuration."""
    kind = config.get("model_type", "")
    by_kind = _keys_by_kind(rows)
    if not isinstance(kind, str) or kind not in by_kind:
        why = f"model_type {kind!r} is not one of {', '.join(by_kind)}"
        for reason, kinds in _REFUSED.items():
            if str(kind) in kinds.split():
                why = f"{kind} has {reason}, which is not modelled"
        raise _UnmodelledError(why)
    keys = by_kind[kind]
    read = {key for key, _ in keys.values()}
    for key, uniform in _UNIFORM.items():
        if key not in read and config.get(key) not in (None, *uniform):
            raise _UnmodelledError(
                f"{key}={config[key]!r}: layers of several kinds are not modelled"
            )
    texts = {field: _value(where, config, *of) for field, of in keys.items()}
    if texts.get("mixer_rank") == "auto":
        texts["mixer_rank"] = str(-(-int(texts["hidden"]) // 16))  # rounded up [Mamba]
    shape = parse_fields(Transformer, texts, where)
    if shape.get("positions", "learned") != "learned":
        shape["sequence"] = _trained_sequence(config, shape["sequence"])
    shape["ffn"] = shape["ffn"] or (0 if kind in STACKED else 4 * shape["hidden"])
    if shape.get("image") and shape.get("patch"):  # a rest of pixels is left aside
        shape["image"] -= shape["image"] % shape["patch"]
    bias = shape.get("attention_bias", "all")  # of several models a flag
    shape["attention_bias"] = {"1": "all", "0": "none"}.get(bias, bias)
    every = shape.get("full_every", 0)
    shape["full_every"] = _full_every(config, every) if shape.get("window") else 0
    try:
        rest = stacked if kind in STACKED else _fields_without_key
        return shape | rest(kind, config, shape)
    except ValueError as error:
        raise _UnmodelledError(str(error)) from None


def _nearest_call(config):
    """The call that describes a model that no configuration says, with the sizes that this one
    has.
    """
    sizes = []
    for field, keys in _SIZES.items():
        values = [config[key] for key in keys.split() if key in config]
        text = short_repr(values[0]).strip("'") if values else "..."
        sizes.append(f"{field}={text}")
    return (
        "describe the nearest model: "
        f"madmax_lib.catalog.models.Transformer('mine', {', '.join(sizes)}, "
        "sequence=...)"
    )


def _keys_by_kind(rows):
    """Key and default by field of each kind, with those of the kinds that it is like;
    these stand above it.
    """
    kinds = {}
    columns = ["model_type", "field", "key", "default"]
    for names, field, key, default in rows[columns].itertuples(index=False):
        for kind in names.split():
            inherited = kinds[default] if field == "like" else {field: (key, default)}
            kinds.setdefault(kind, {}).update(inherited)
    return kinds


def _value(where, config, key, default):
    """The value of the first of the keys that is there, as text."""
    values = [config[name] for name in key.split() if config.get(name) is not None]
    if not values and not default:
        raise ValueError(f"{where}: field {key!r} is missing")
    value = values[0] if values else default
    if isinstance(value, dict) and "id2label" in key:
        return str(len(value))  # classes of an image
    if isinstance(value, bool):
        return str(int(value))
    is_size = isinstance(value, str)
    if isinstance(value, (int, float)):
        # without a default every such model has some of it; 64 bits hold a size
        is_size = 0 <= value < 2**62 and (value != 0 or bool(default))
    if not is_size:
        raise ValueError(f"{where}: {key}={short_repr(value)} is not a size")
    return str(value)


def _trained_sequence(config, positions):
    """Tokens per sample of the pre-training, 0 where positions are those of a long
    context that was added later.
    """
    key = "original_max_position_embeddings"
    scaling = config.get("rope_scaling")
    original = config.get(key)
    if not original and isinstance(scaling, dict):
        original = scaling.get(key)
    if original:
        return require_int(key, original)
    return positions if positions <= _LONGEST_TRAINED else 0


def _full_every(config, every):
    """Every layer of this number attends to all tokens, 0 for none; by `layer_types`
    where it is there.
    """
    types = config.get("layer_types")
    if not types:
        return every
    full = [number for number, name in enumerate(types, 1) if name == "full_attention"]
    if not full:
        return 0
    every = full[0]
    if full != [*range(every, len(types) + 1, every)]:
        raise _UnmodelledError(
            f"layer_types: full attention in layers {full} is not every n-th"
        )
    return every


def _fields_without_key(kind, config, shape):
    """Parameters and flags that no key tells alone [the modelling files of
    transformers].
    """
    hidden = shape["hidden"]
    heads = require_int("num_attention_heads", shape["heads"], 1)
    has_bias = shape["attention_bias"] == "all"
    if kind == "bert":  # types of tokens and the pooler
        types = size_of(config, "type_vocab_size", 2, least=0)
        return {"other_parameters": types * hidden + hidden * (hidden + 1)}
    if kind in ("vit", "dinov2"):
        return _of_images(kind, config, hidden)
    if kind == "siglip_vision_model":
        if not config.get("vision_use_head", True):
            raise ValueError("vision_use_head=False is not modelled")
        # a head that pools by attention: probe, products, norm, feed-forward part;
        # the class token and its position, which the count has, are not there
        attention = hidden + 4 * hidden * (hidden + 1)
        feed_forward = (2 * hidden + 1) * shape["ffn"] + hidden
        pooling = attention + 2 * hidden + feed_forward
        return {"other_parameters": pooling - 2 * hidden}
    if kind in ("gemma2", "gemma3_text", "gemma3"):
        # norms after attention and feed-forward part too
        return {"other_layer_parameters": 2 * hidden}
    if kind == "olmo2":  # norms of all of q and k, not of each head
        width = shape.get("head_dim") or hidden // heads
        return {
            "other_layer_parameters": (heads + shape.get("kv_heads", heads)) * width
        }
    if kind == "glm4_moe" and has_bias:
        return {"attention_bias": "qkv"}
    if shape.get("kv_lora_rank") and has_bias:
        # biases of the products down to latents and of the last
        latents = shape.get("q_lora_rank", 0) + shape["kv_lora_rank"]
        biases = latents + shape["rope_head_dim"] + hidden
        return {"attention_bias": "none", "other_layer_parameters": biases}
    return _shared_expert(config, shape) if kind == "qwen2_moe" else {}


def _of_images(kind, config, hidden):
    """Fields of ViT and DINOv2, which has a mask token, scales of both branches and the
    ratio of its feed-forward part; biases of both kinds.
    """
    fields = {"other_layer_parameters": 0}
    if not config.get("qkv_bias", True):  # the projection has a bias all the same
        fields = {"attention_bias": "none", "other_layer_parameters": hidden}
    if kind == "vit":
        return fields
    ffn = hidden * size_of(config, "mlp_ratio", 4)
    if config.get("use_swiglu_ffn"):  # two thirds, to the next multiple of 8
        fields["gated"] = True
        ffn = (ffn * 2 // 3 + 7) // 8 * 8
    fields["other_layer_parameters"] += 2 * hidden
    return fields | {"ffn": ffn, "other_parameters": hidden}


def _shared_expert(config, shape):
    """Fields of Qwen2-MoE's shared expert: as wide as several, with a gate."""
    key = "shared_expert_intermediate_size"
    width = size_of(config, key, 5632, least=0)
    if width % shape["expert_ffn"] or shape["moe_every"] > 1:
        raise ValueError(
            f"{key}={width} and moe_intermediate_size={shape['expert_ffn']}: a shared "
            "expert of no multiple, or of some layers alone, is not modelled"
        )
    count = width // shape["expert_ffn"]
    return {"shared_experts": count, "other_layer_parameters": shape["hidden"]}
