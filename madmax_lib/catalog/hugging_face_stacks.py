"""Which kinds of layers does a configuration of Hugging Face stack? `blocks` of a
`Transformer`, and sizes of mixers.

Read as the classes of transformers 5.23 build them; T5's head as those of transformers
4.
"""

from functools import partial
from pathlib import Path

from madmax_lib.base.fields import require_int, short_repr

__all__ = ["STACKED", "of_mamba_ssm", "stacked"]

_LAYER_TYPES = {
    "mamba": "M",
    "linear_attention": "M",
    "attention": "*",
    "full_attention": "*",
    "moe": "E",
    "mlp": "-",
}


def stacked(kind: str, config: dict, shape: dict) -> dict:
    """Fields of a model of such a kind beside its shape, or in their place. Raises
    ValueError for what none says.
    """
    fields = STACKED[kind](config, shape)
    words = fields["blocks"]
    count = len(words)
    period = next(
        n
        for n in range(1, count + 1)
        if count % n == 0 and words == words[:n] * (count // n)
    )
    fields |= {"layers": count, "blocks": " ".join(words[:period])}
    if not any("E" in word for word in words):
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
    own = config["ssm_cfg"]
    padded = require_int(
        "pad_vocab_size_multiple", config.get("pad_vocab_size_multiple", 8), 1
    )
    vocab, hidden = (
        require_int(f"{path}: {name}", config.get(name), 1)
        for name in ("vocab_size", "d_model")
    )
    sizes = {
        "hidden_size": hidden,
        "num_hidden_layers": config.get("n_layer"),
        "state_size": own.get("d_state"),
    }
    sizes |= {
        "vocab_size": -(-vocab // padded) * padded,
        "tie_word_embeddings": config.get("tie_embeddings", True),
    }
    sizes |= {
        "expand": own.get("expand", 2),
        "conv_kernel": own.get("d_conv"),
        "model_type": "mamba",
    }
    if own.get("layer") == "Mamba2":
        heads = (
            require_int("expand", sizes["expand"], 1)
            * hidden
            // require_int("headdim", own.get("headdim", 64), 1)
        )
        sizes |= {
            "model_type": "mamba2",
            "num_heads": heads,
            "n_groups": own.get("ngroups", 1),
        }
    return sizes


def _encoder_decoder(
    config: dict, shape: dict, usual: str = "gated-gelu", tables: int = 0
) -> dict:
    """T5: two stacks with a norm behind each, and tables of relative positions, 0 for
    one in each layer.
    """
    encoder = shape["layers"]
    decoder = require_int(
        "num_decoder_layers", config.get("num_decoder_layers") or encoder, 1
    )
    buckets = require_int(
        "relative_attention_num_buckets",
        config.get("relative_attention_num_buckets", 32),
        1,
    )
    gated = shape["gated"] or str(config.get("feed_forward_proj", usual)).startswith(
        "gated"
    )
    other = (tables or encoder + decoder) * buckets * shape["heads"] + shape["hidden"]
    return {
        "blocks": ["*-"] * encoder + ["*x-"] * decoder,
        "gated": gated,
        "other_parameters": other,
    }


def _mamba(config: dict, shape: dict) -> dict:
    """Layers of one mixer each."""
    letter = "M" if shape.get("mixer_heads") else "m"
    return {
        "blocks": [letter] * shape["layers"],
        **_mixer(config, shape, letter, "", "use_bias"),
    }


def _jamba(config: dict, shape: dict) -> dict:
    """A mixer or attention, and behind it a feed-forward part or experts, each in its
    period.
    """
    names = (
        "attn_layer_period",
        "attn_layer_offset",
        "expert_layer_period",
        "expert_layer_offset",
    )
    period, offset, every, first = (
        require_int(name, config.get(name, usual), least)
        for name, usual, least in zip(names, (8, 4, 2, 1), (1, 0, 1, 0), strict=True)
    )
    many = shape["experts"] > 1
    blocks = [
        ("*" if layer % period == offset else "m")
        + ("E" if many and layer % every == first else "-")
        for layer in range(shape["layers"])
    ]
    fields = _mixer(config, shape, "m", "mamba_", "mamba_proj_bias")
    fields["other_mixer_parameters"] += (
        shape["mixer_rank"] + 2 * shape["mixer_state"]
    )  # norms of dt, B and C
    return {"blocks": blocks, **fields}


def _bamba(config: dict, shape: dict) -> dict:
    attention = config.get("attn_layer_indices") or []
    if not isinstance(attention, list):
        raise ValueError(
            f"attn_layer_indices={short_repr(attention)} is no list of layers"
        )
    blocks = ["*-" if layer in attention else "M-" for layer in range(shape["layers"])]
    return {"blocks": blocks, **_mixer(config, shape, "M", "mamba_", "mamba_proj_bias")}


def _granite(config: dict, shape: dict) -> dict:
    """Behind each mixer or attention experts, where there are any, with a shared one of
    a multiple of their width.
    """
    types = (
        config.get("layer_types")
        or config.get("layers_block_type")
        or ["mamba"] * shape["layers"]
    )
    shared = shape["ffn"]
    width = shape["expert_ffn"]
    if shape["experts"] and shared % width:
        raise ValueError(
            f"shared_intermediate_size={shared} is no multiple of "
            f"intermediate_size={width}, an expert's"
        )
    blocks = [letter + ("E" if shape["experts"] else "-") for letter in _letters(types)]
    rope = "rope" if config.get("position_embedding_type") == "rope" else "none"
    fields = {"blocks": blocks, "shared_experts": shared // width, "positions": rope}
    return fields | _mixer(config, shape, "M", "mamba_", "mamba_proj_bias")


def _nemotron(config: dict, shape: dict) -> dict:
    """A block per layer; the shared expert may be as wide as several."""
    pattern = config.get("hybrid_override_pattern")
    types = config.get("layers_block_type") or config.get("layer_types")
    blocks = list(pattern) if isinstance(pattern, str) else _letters(types or [])
    if not blocks or set(blocks) - set("M-*E"):
        raise ValueError(
            f"hybrid_override_pattern={short_repr(pattern)} is no text of M, -, * and E"
        )
    fields = {"blocks": blocks, **_mixer(config, shape, "M", "", "use_bias")}
    fields["mixer_channels"] = shape["mixer_heads"] * require_int(
        "mamba_head_dim", config.get("mamba_head_dim", 64), 1
    )
    fields["other_mixer_parameters"] = _biases(
        shape | fields, "M", config, "", "use_bias"
    )
    if "E" in blocks:
        shared = config.get("moe_shared_expert_intermediate_size", 7688)
        width = shape["expert_ffn"]
        if (
            config.get("moe_latent_size")
            or not width
            or require_int("moe_shared_expert_intermediate_size", shared) % width
        ):
            raise ValueError(
                "experts of a latent, or with a shared one of no multiple of their "
                "width, are not modelled"
            )
        fields["shared_experts"] = shared // width
    return fields


def _letters(types: list) -> list[str]:
    if not isinstance(types, list) or (
        unknown := [name for name in types if name not in _LAYER_TYPES]
    ):
        raise ValueError(
            f"layer_types: {short_repr(unknown[0] if isinstance(types, list) else types)} "
            "is not modelled"
        )
    return [_LAYER_TYPES[name] for name in types]


def _mixer(config: dict, shape: dict, letter: str, prefix: str, bias: str) -> dict:
    """Channels of a mixer and its further parameters; prefix, bias: of the keys that
    say so.
    """
    width = config.get(f"{prefix}expand", 2)
    channels = require_int(
        f"{prefix}expand x width",
        width * shape["hidden"] if isinstance(width, (int, float)) else width,
    )
    shape = shape | {"mixer_channels": channels}
    return {
        "mixer_channels": channels,
        "other_mixer_parameters": _biases(shape, letter, config, prefix, bias),
    }


def _biases(shape: dict, letter: str, config: dict, prefix: str, bias: str) -> int:
    """Of the convolution, which usually has some, and of the products into and out of
    the mixer.
    """
    inner = shape["mixer_channels"]
    further = 0
    if letter == "M":
        further = 2 * shape["mixer_groups"] * shape["mixer_state"]
    first = 2 * inner + further + (shape["mixer_heads"] if letter == "M" else 0)
    of_conv = bool(
        config.get("mamba_conv_bias" if prefix else "use_conv_bias", True)
    ) * (inner + further)
    return of_conv + bool(config.get(bias, False)) * (first + shape["hidden"])


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
}
