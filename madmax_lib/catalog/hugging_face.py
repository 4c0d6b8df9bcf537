"""A `Transformer` from a Hugging Face `config.json`, by the keys in
`data/hugging_face.csv`.

A kind takes the rows of the kind that it is `like`, and puts its own in their place.
`hugging_face_stacks` reads stacks of several kinds of layers; what no stack says is
refused with the reason.
"""

import warnings
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path

import pandas as pd

from madmax_lib.base.fields import parse_fields, require_int, short_repr
from madmax_lib.catalog.data_files import read_object
from madmax_lib.catalog.hugging_face_stacks import (
    WORDS,
    of_mamba_ssm,
    size_of,
    stacked,
)
from madmax_lib.catalog.hugging_face_towers import tower_fields
from madmax_lib.catalog.models import Transformer

# tokens; longer contexts come from a short last phase [Llama 3, arXiv 2407.21783,
# 3.4.2]
_LONGEST_TRAINED = 65_536


@dataclass(frozen=True)
class _Terms:
    """Rows of the table that are no fields of a `Transformer`, and become some."""

    more_norms: int = 0  # of a layer, beside its two
    qk_norm_all: bool = False  # norms of all of q and k, not of each head
    qkv_bias: bool = False  # biases of all products of attention but the last
    shared_ffn: int = 0  # width of the shared expert, of a multiple of the others'
    expert_gate: bool = False  # a number per token that scales the shared expert


# values of keys with which all layers are of one kind
_UNIFORM = WORDS["uniform"]
# keys of a size, whatever the kind
_SIZES = WORDS["sizes"]
# keys of a whole model that its text part has too
_SHARED = ("tie_word_embeddings",)
# channels that no model has: a slip of the pen
_WIDEST = 2**20
# kind of those that are not known and have no keys but those of Llama's
_LLAMA_SHAPED = "llama-shaped"


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
    config = read_object(path)
    folder = path.parent.name if path.stem == "config" else ""
    name = config.get("_name_or_path") or folder or path.stem
    if "peft_type" in config:
        base = config.get("base_model_name_or_path")
        raise ValueError(
            f"{path}: an adapter ({config['peft_type']}) of {base}; give the "
            "config.json of that model, and lora_rank to the plan"
        )
    if isinstance(config.get("ssm_cfg"), dict):
        config = of_mamba_ssm(path, config)
    config, seen = _trained_part(path, config)
    try:
        fields = _fields(config, rows, str(path))
        return Transformer(name, **fields | _seen(path, seen, fields["hidden"]))
    except _UnmodelledError as error:
        raise ValueError(f"{path}: {error}; {_nearest_call(config)}") from None
    except (AttributeError, KeyError, TypeError) as error:  # a number for a list
        raise ValueError(
            f"{path}: a value is not of the kind that its key has ({error})"
        ) from None


class _UnmodelledError(ValueError):
    """Layers that no `Transformer` describes: the message shows what comes nearest."""


def _trained_part(path, config):
    """The image part of SigLIP, the text part of others that have several; and the
    configuration of what sees.
    """
    config = config.get("thinker_config") or config  # of an omni model
    kind = config.get("model_type")
    seen = config.get("vision_config")
    if kind == "siglip" and isinstance(seen, dict):
        part = seen | {"model_type": "siglip_vision_model"}
        message = f"{path}: only the image part is read, not the text part"
        warnings.warn(message, stacklevel=4)  # at the user's mm.model
        return part, None
    text = config.get("text_config") or config.get("llm_config")
    if not isinstance(text, dict) and not isinstance(seen, dict):
        return config, None
    shared = {name: config[name] for name in _SHARED if name in config}
    part = {"model_type": kind, **shared, **text} if isinstance(text, dict) else config
    projected = config.get("projector_hidden_size", 4096)
    seen = {"projected": projected} | (seen or {})
    seen["model_type"] = seen.get("model_type") or f"{kind}_vision"
    return part, seen


def _seen(path, config, hidden):
    """Fields of a tower, of one image a sample, with a warning that says so."""
    if config is None:
        return {}
    is_said = len(config) > 2
    result = tower_fields(config["model_type"], config, hidden) if is_said else {}
    message = "only the text part is read, not the vision or audio parts"
    if result:
        edge = result["tower"].image
        message = f"with one image of {edge} pixels a sample; replace(model, images=0) has none"
    warnings.warn(f"{path}: {message}", stacklevel=4)  # at the user's mm.model
    return result


def _fields(config, rows, where):
    """Fields of the `Transformer` of a configuration."""
    kind = config.get("model_type", "")
    by_kind = _keys_by_kind(rows)
    if not isinstance(kind, str) or kind not in by_kind:
        kind = _guessed(config, by_kind, where)
    keys = by_kind[kind] | {}
    read = {word for key, _ in keys.values() for word in key.split()}
    keys.pop("harmless", None)
    stack = keys.pop("stack", None)
    if lack := keys.pop("lacking", None):
        warnings.warn(f"{where}: {lack[1]}", stacklevel=4)  # at the user's mm.model
    if "refused" in keys:
        nearest, reason = keys["refused"]
        raise _UnmodelledError(
            f"{kind} has {reason}, which is not modelled; the nearest that can be read is "
            f"{nearest}"
        )
    for key, uniform in _UNIFORM.items():
        if key not in read and config.get(key) not in (None, *uniform):
            raise _UnmodelledError(
                f"{key}={config[key]!r}: layers of several kinds, or with tables of their "
                "own, are not modelled"
            )
    config = config | _own_sizes(config, read)
    texts = {field: _value(where, config, *of) for field, of in keys.items()}
    pattern = texts.get("full_every", "")
    if pattern.strip("L") == "G":  # local layers and a global one, such as LLLG
        texts["full_every"] = str(len(pattern))
    if texts["hidden"].isdecimal() and int(texts["hidden"]) > _WIDEST:
        raise ValueError(f"{where}: no model has {texts['hidden']} channels")
    if texts.get("mixer_rank") == "auto":
        texts["mixer_rank"] = str(-(-int(texts["hidden"]) // 16))  # rounded up [Mamba]
    names = (field.name for field in fields(_Terms))
    terms = {name: texts.pop(name) for name in names if name in texts}
    terms = _Terms(**parse_fields(_Terms, terms, where))
    parts = [f"{name}={texts.pop(name)}" for name in [*texts] if "." in name]
    shape = parse_fields(Transformer, texts, where)
    shape["block_fields"] = " ".join(parts)
    if shape.get("positions", "learned") != "learned":
        shape["sequence"] = _trained_sequence(config, shape["sequence"])
    shape |= _dense_layers(config)
    if config.get("n_group") == 1:  # one group of all experts limits nothing
        shape["routed_nodes"] = 0
    shape["ffn"] = shape["ffn"] or (0 if stack else 4 * shape["hidden"])
    if shape.get("image") and shape.get("patch"):  # a rest of pixels is left aside
        shape["image"] -= shape["image"] % shape["patch"]
    bias = shape.get("attention_bias", "all")  # of several models a flag
    shape["attention_bias"] = {"1": "all", "0": "none"}.get(bias, bias)
    if shape.get("kv_lora_rank") and shape["attention_bias"] == "all":
        raise _UnmodelledError("attention_bias: biases of latents are not modelled")
    if not stack:
        every = _full_every(config, shape.get("full_every", 0))
        shape["full_every"] = every if shape.get("window") else 0
    try:
        shape |= _of_terms(terms, shape)
        if stack:
            return shape | stacked(*stack, config, shape)
        return shape | _fields_without_key(kind, config, shape)
    except ValueError as error:
        raise _UnmodelledError(str(error)) from None


def _own_sizes(config, read):
    """Sizes of some layers alone, under names that begin with own_ or linear_."""
    sizes = {}
    for part in (config.get("per_layer_config") or {}).values():
        for key, size in part.items():
            name = f"own_{key}"
            if name not in read or sizes.setdefault(name, size) != size:
                raise _UnmodelledError(
                    f"per_layer_config: {key}={short_repr(size)} of some layers is not "
                    "modelled"
                )
    parts = {"own": "attention_other_setting", "linear": "linear_attn_config"}
    for prefix, part in parts.items():
        others = config.get(part) or {}
        sizes |= {f"{prefix}_{key}": size for key, size in others.items()}
    return sizes


def _dense_layers(config):
    """Number of the first layers that are dense, where a list says which are."""
    if mixtures := config.get("moe_layers_enum"):  # numbers in a text or a list
        numbers = str(mixtures).strip("[]").replace(" ", "").split(",")
        layers = range(size_of(config, "num_hidden_layers"))
        listed = [int(str(layer) in numbers) for layer in layers]
        config = {"moe_layer_freq": listed} | config
    for key in ("mlp_layer_types", "moe_layer_freq"):
        types = config.get(key)
        if not isinstance(types, list) or not types:
            continue
        dense = [layer for layer, name in enumerate(types) if name in ("dense", 0)]
        if dense != [*range(len(dense))]:
            raise _UnmodelledError(
                f"{key}: dense layers {dense} are not the first ones"
            )
        return {"dense_layers": len(dense)}
    return {}


def _guessed(config, by_kind, where):
    """Kind of a configuration of none that is known: Llama's, with a warning, where it
    says its sizes, and nothing that is not known to leave these as they are.
    """
    kind = config.get("model_type", "")
    shaped = by_kind[_LLAMA_SHAPED]
    harmless = set(shaped["harmless"][0].split())
    of_llama = harmless.union(*(key.split() for key, _ in shaped.values()))
    needed = {names.split()[0] for names in _SIZES.values()}
    others = [key for key in config if key not in of_llama]
    if needed <= config.keys() and not others:
        warnings.warn(
            f"{where}: model_type {kind!r} is unknown and read like Llama's: gated "
            "feed-forward parts, RMS norms, no biases",
            stacklevel=5,  # at the user's mm.model
        )
        return _LLAMA_SHAPED
    near = get_close_matches(str(kind), by_kind, cutoff=0.3) or ["llama"]
    why = (
        f", and {others[0]!r} is not a key of Llama's"
        if needed <= config.keys()
        else ""
    )
    raise _UnmodelledError(
        f"model_type {kind!r} is not read{why}; nearest by name: {', '.join(near)}"
    )


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
    if isinstance(value, list) and value and value.count(value[0]) == len(value):
        value = value[0]  # one for each layer, all alike
    if isinstance(value, dict) and "id2label" in key:
        return str(len(value))  # classes of an image
    if isinstance(value, bool):
        return str(int(value))
    is_size = isinstance(value, str)
    if isinstance(value, int | float):
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
    if kind == "falcon":  # of Falcon-40B's kind two norms and some heads of keys
        is_new = bool(config.get("new_decoder_architecture"))
        norms = config.get("num_ln_in_parallel_attn") or 1 + is_new
        has_one = config.get("multi_query", True) and not is_new
        return {
            "shared_norm": shape["shared_norm"] and norms == 1,
            "kv_heads": 1 if has_one else shape["kv_heads"],
        }
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
    return {}


def _of_terms(terms, shape):
    """Fields that the terms of a kind become."""
    hidden = shape["hidden"]
    heads = require_int("num_attention_heads", shape["heads"], 1)
    width = shape.get("head_dim") or hidden // heads
    projected = (heads + (shape.get("kv_heads") or heads)) * width
    more = (terms.more_norms + terms.expert_gate) * hidden
    more += terms.qk_norm_all * projected
    result = {"other_layer_parameters": more} if more else {}
    if terms.qkv_bias:
        result["attention_bias"] = "qkv"
    if shared := terms.shared_ffn * (shape.get("experts", 0) > 0):
        expert = shape.get("expert_ffn") or shape["ffn"]
        if shared % expert or shape.get("moe_every", 0) > 1:
            raise ValueError(
                f"a shared expert of width {shared}: not a multiple of {expert}, "
                "the others' width, or only in some layers, is not modelled"
            )
        result["shared_experts"] = shared // expert
    return result


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
