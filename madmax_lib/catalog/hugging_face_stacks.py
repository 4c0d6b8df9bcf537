"""`blocks` of a `Transformer` and sizes of mixers, from a Hugging Face configuration of
several kinds of layers.

Read as the classes of transformers 5.23 build them; T5's head as those of transformers
4.
"""

from functools import partial
from pathlib import Path

from madmax_lib.base.fields import require_int, short_repr

# words for attention to all tokens: those of lists of layers, or 1 beside 0
_FULL = ("full_attention", 1, True)
_HEADS_DIFFER = ("mimo_v2_flash", "step3p5", "step3p7", "cohere2_moe")
# what blocks say of layers
_OF_USUAL_STACKS = ("dense_layers", "moe_every", "full_every")
_GEMMA_4 = ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")
_LAYER_TYPES = {
    "mamba": "M",
    "linear_attention": "M",
    "attention": "*",
    "full_attention": "*",
    "moe": "E",
    "mlp": "-",
}


def size_of(config: dict, key: str, usual: int | None = None, *, least: int = 1) -> int:
    """A size of a configuration, the usual one where it is not there. Raises ValueError
    for another number.
    """
    return require_int(key, config.get(key, usual), least)


def stacked(kind: str, config: dict, shape: dict) -> dict:
    """Fields of a model of such a kind beside its shape, or in their place. Raises
    ValueError for what none says.
    """
    fields = STACKED[kind](config, shape)
    layers = fields["blocks"]
    count = len(layers)
    # the shortest stack that the layers repeat
    for period in range(1, count + 1):
        if count % period == 0 and layers == layers[:period] * (count // period):
            break
    fields |= {"layers": count, "blocks": " ".join(layers[:period])}
    if "E" not in fields["blocks"]:
        fields |= {"experts": 0, "active_experts": 0, "shared_experts": 0}
    return fields


def of_mamba_ssm(path: Path, config: dict) -> dict:
    """A configuration of state-spaces/mamba in the words of transformers.

    Raises ValueError for attention or feed-forward parts among its mixers.
    """
    if config.get("attn_layer_idx") or config.get("d_intermediate"):
        raise ValueError(
            f"{path}: attention or feed-forward parts among the mixers of ssm_cfg "
            "are not modelled"
        )
    mixer = config["ssm_cfg"]
    multiple = size_of(config, "pad_vocab_size_multiple", 8)
    vocab = require_int(f"{path}: vocab_size", config.get("vocab_size"), 1)
    hidden = require_int(f"{path}: d_model", config.get("d_model"), 1)
    sizes = {
        "model_type": "mamba",
        "hidden_size": hidden,
        "num_hidden_layers": config.get("n_layer"),
        "state_size": mixer.get("d_state"),
        "vocab_size": -(-vocab // multiple) * multiple,
        "tie_word_embeddings": config.get("tie_embeddings", True),
        "expand": mixer.get("expand", 2),
        "conv_kernel": mixer.get("d_conv"),
    }
    if mixer.get("layer") == "Mamba2":
        channels = size_of(sizes, "expand") * hidden
        sizes |= {
            "model_type": "mamba2",
            "num_heads": channels // size_of(mixer, "headdim", 64),
            "n_groups": mixer.get("ngroups", 1),
        }
    return sizes


def in_usual_words(config: dict) -> dict:
    """A configuration that says which layers are mixtures, and which attend to a window,
    as transformers does; sizes of some layers alone have `own_` before their keys.

    Raises ValueError for a number of layers that is none.
    """
    result = config | {}
    mixtures = config.get("moe_layer_freq")
    if numbers := config.get("moe_layers_enum"):  # such as 3,4,5
        numbers = str(numbers).strip("[]").replace(" ", "").split(",")
        count = size_of(config, "num_hidden_layers")
        mixtures = [str(layer) in numbers for layer in range(count)]
    if isinstance(mixtures, list):
        words = ["sparse" if flag else "dense" for flag in mixtures]
        result |= {"mlp_layer_types": words, "moe_layer_freq": None}
    if isinstance(flags := config.get("hybrid_layer_pattern"), list):
        result["layer_types"] = ["window" if flag else _FULL[0] for flag in flags]
    by_layer = config.get("per_layer_config")
    parts = [config.get("attention_other_setting")]
    parts += by_layer.values() if isinstance(by_layer, dict) else []
    for part in parts:
        if isinstance(part, dict):
            result |= {f"own_{key}": size for key, size in part.items()}
    return result


def _encoder_decoder(config, shape, usual="gated-gelu", tables=0):
    """T5: two stacks with a norm after each, and tables of relative positions, 0 for
    one in each layer.
    """
    encoder = shape["layers"]
    key = "num_decoder_layers"
    decoder = require_int(key, config.get(key) or encoder, 1)
    buckets = size_of(config, "relative_attention_num_buckets", 32)
    activation = str(config.get("feed_forward_proj", usual))
    # positions are a number per bucket and head; the encoder has a last norm of its own
    positions = (tables or encoder + decoder) * buckets * shape["heads"]
    return {
        "blocks": ["*-"] * encoder + ["*x-"] * decoder,
        "gated": shape["gated"] or activation.startswith("gated"),
        "other_parameters": positions + shape["hidden"],
    }


def _mamba(config, shape):
    """Layers of one mixer each."""
    letter = "M" if shape.get("mixer_heads") else "m"
    mixer = _mixer(config, shape, letter)
    return {"blocks": [letter] * shape["layers"], **mixer}


def _jamba(config, shape):
    """A mixer or attention, and after it a feed-forward part or experts, each in its
    period.
    """
    period = size_of(config, "attn_layer_period", 8)
    offset = size_of(config, "attn_layer_offset", 4, least=0)
    every = size_of(config, "expert_layer_period", 2)
    first = size_of(config, "expert_layer_offset", 1, least=0)
    if shape["experts"] <= 1:
        first = every  # no layer has this rest: none is a mixture
    blocks = [
        ("*" if layer % period == offset else "m")
        + ("E" if layer % every == first else "-")
        for layer in range(shape["layers"])
    ]
    fields = _mixer(config, shape, "m", "mamba_")
    # norms of dt, B and C
    norms = shape["mixer_rank"] + 2 * shape["mixer_state"]
    fields["other_mixer_parameters"] += norms
    return {"blocks": blocks, **fields}


def _bamba(config, shape):
    """A mixer, or attention in the layers of a list, and a feed-forward part."""
    attention = config.get("attn_layer_indices") or []
    if not isinstance(attention, list):
        raise ValueError(
            f"attn_layer_indices={short_repr(attention)} is not a list of layers"
        )
    blocks = ["*-" if layer in attention else "M-" for layer in range(shape["layers"])]
    return {"blocks": blocks, **_mixer(config, shape, "M", "mamba_")}


def _granite(config, shape):
    """After each mixer or attention experts, where there are any, with a shared one of
    a multiple of their width.
    """
    types = config.get("layer_types") or config.get("layers_block_type")
    second = "E" if shape["experts"] else "-"
    first = _letters(types or ["mamba"] * shape["layers"])
    rope = "rope" if config.get("position_embedding_type") == "rope" else "none"
    fields = {
        "blocks": [letter + second for letter in first],
        "positions": rope,
    }
    return fields | _mixer(config, shape, "M", "mamba_")


def _nemotron(config, shape):
    """A block per layer; the shared expert may be as wide as several."""
    pattern = config.get("hybrid_override_pattern")
    types = config.get("layers_block_type") or config.get("layer_types")
    blocks = list(pattern) if isinstance(pattern, str) else _letters(types or [])
    if not blocks or set(blocks) - set("M-*E"):
        raise ValueError(
            f"hybrid_override_pattern={short_repr(pattern)} is not made of M, -, * and E"
        )
    channels = shape["mixer_heads"] * size_of(config, "mamba_head_dim", 64)
    fields = {"blocks": blocks, **_mixer(config, shape, "M", channels=channels)}
    return fields


def _mixed(config, shape, letter):
    """Another block, or attention in every n-th layer or those of a list, and a
    feed-forward part or experts.
    """
    count = shape["layers"]
    types = config.get("layer_types") or config.get("attn_type_list")
    if not types:
        every = require_int("full_every", shape["full_every"], 1)
        types = [(layer + 1) % every == 0 for layer in range(count)]
    first = ["*" if word in _FULL else letter for word in types]
    dense = shape.get("dense_layers", 0) if shape["experts"] else count
    blocks = [
        block + ("-" if layer < dense else "E")
        for layer, block in enumerate(first[:count])
    ]
    return {"blocks": blocks} | dict.fromkeys(_OF_USUAL_STACKS, 0)


def _windowed(config, shape, *, is_gemma=False):
    """Attention to a window, or to all tokens with heads of its own; Gemma 4 has experts
    beside the feed-forward part, with three norms, and a scale of what is routed.
    """
    fields = _mixed(config, shape, "w")
    if is_gemma and shape["experts"]:
        fields["blocks"] = [word.replace("E", "-E") for word in fields["blocks"]]
        more = shape["other_layer_parameters"] + 3 * shape["hidden"]
        fields["other_layer_parameters"] = more
    return fields


def _linear(config, shape, letter):
    """A mixer, or attention, and a feed-forward part or experts."""
    width = shape.get("head_dim") or shape["hidden"] // shape["heads"]
    # the gate of a shared expert stands in every layer
    gate = shape.get("other_layer_parameters", 0)
    return _mixed(config, shape, letter) | {
        "mixer_channels": shape["mixer_heads"] * width,
        "mixer_state": shape.get("mixer_state", width),
        "other_mixer_parameters": gate,
    }


def _delta_net(config, shape):
    width = size_of(config, "linear_value_head_dim", 128)
    channels = {"mixer_channels": shape["mixer_heads"] * width}
    return _linear(config, shape, "G") | channels


def _kimi(config, shape):
    """Lists of layers, counted from 1, and sizes stand in a part of their own."""
    part = config.get("linear_attn_config") or {}
    full = part.get("full_attn_layers")
    if full:
        types = [layer in full for layer in range(1, shape["layers"] + 1)]
        config = config | {"layer_types": types}
    width = size_of(part, "head_dim", size_of(config, "linear_head_dim", 128))
    heads = size_of(part, "num_heads", size_of(config, "linear_num_heads", 32))
    conv = size_of(config, "linear_conv_kernel_dim", 4)
    return _linear(config, shape | {"mixer_heads": heads}, "K") | {
        "mixer_channels": heads * width,
        "mixer_heads": heads,
        "mixer_state": width,
        "mixer_conv": size_of(part, "short_conv_kernel_size", conv),
    }


def _letters(types):
    wrong = types
    if isinstance(types, list):
        wrong = next((name for name in types if name not in _LAYER_TYPES), None)
    if wrong is not None:
        raise ValueError(f"layer_types: {short_repr(wrong)} is not modelled")
    return [_LAYER_TYPES[name] for name in types]


def _mixer(
    config,
    shape,
    letter,
    prefix="",
    channels=None,
):
    """Channels of a mixer and its biases; prefix: of the keys of hybrid models."""
    if channels is None:
        width = config.get(f"{prefix}expand", 2)
        if isinstance(width, (int, float)):
            width *= shape["hidden"]
        channels = require_int(f"{prefix}expand x width", width)
    # what the convolution sees: x, of Mamba-2 B and C too; what the first product
    # gives: gate and that, of Mamba-2 dt of the heads too
    convolved = channels
    outputs = 2 * channels
    if letter == "M":
        groups = 2 * shape["mixer_groups"] * shape["mixer_state"]
        convolved += groups
        outputs += groups + shape["mixer_heads"]
    biases = 0
    if config.get("mamba_conv_bias" if prefix else "use_conv_bias", True):
        biases += convolved
    if config.get("mamba_proj_bias" if prefix else "use_bias", False):
        biases += outputs + shape["hidden"]
    return {"mixer_channels": channels, "other_mixer_parameters": biases}


STACKED = {
    "t5": partial(_encoder_decoder, usual="relu", tables=2),
    "mt5": partial(_encoder_decoder, tables=2),
    "umt5": _encoder_decoder,
    "mamba": _mamba,
    "falcon_mamba": _mamba,
    "mamba2": _mamba,
    "jamba": _jamba,
    "bamba": _bamba,
    "granitemoehybrid": _granite,
    "nemotron_h": _nemotron,
    "qwen3_next": _delta_net,
    "qwen3_5_text": _delta_net,
    "qwen3_5_moe_text": _delta_net,
    "minimax": partial(_linear, letter="L"),
    "minimax_text_01": partial(_linear, letter="L"),
    "kimi_linear": _kimi,
    **dict.fromkeys(_GEMMA_4, partial(_windowed, is_gemma=True)),
    **dict.fromkeys(_HEADS_DIFFER, _windowed),
}
