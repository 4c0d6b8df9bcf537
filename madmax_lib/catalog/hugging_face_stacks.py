"""`blocks` of a `Transformer` and sizes of mixers, from a Hugging Face configuration of
several kinds of layers.

Read as the classes of transformers 5.23 build them; T5's head as those of transformers
4.
"""

import json
from collections import Counter
from pathlib import Path

from madmax_lib.base.fields import require_int, short_repr
from madmax_lib.catalog.blocks import FURTHER, OF_USUAL_STACKS, BlockKind
from madmax_lib.catalog.data_files import data_file

# blocks by words of lists of layers, and by tokens that become one; keys of sizes, and
# values of keys with which all layers are of one kind
WORDS = json.loads(data_file("hugging_face_words.json").read_text())


def size_of(config: dict, key: str, usual: int | None = None, *, least: int = 1) -> int:
    """A size of a configuration, the usual one where it is not there. Raises ValueError
    for another number.
    """
    return require_int(key, config.get(key, usual), least)


def stacked(letter: str, stack: str, config: dict, shape: dict) -> dict:
    """Fields of a model of such a stack beside its shape, or in their place; letter: of
    its blocks that differ. Raises ValueError for what none says.
    """
    fields = _STACKS[stack](config, shape, letter)
    layers = fields["blocks"]
    count = len(layers)
    # the shortest stack that the layers repeat
    for period in range(1, count + 1):
        if count % period == 0 and layers == layers[:period] * (count // period):
            break
    fields |= {"layers": count, "blocks": " ".join(layers[:period])}
    parts = (shape | fields)["block_fields"].split()
    used = [part for part in parts if part[0] in fields["blocks"]]
    fields["block_fields"] = " ".join(used)
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
    channels = size_of(mixer, "expand", 2) * hidden
    sizes = {
        "model_type": "mamba2" if mixer.get("layer") == "Mamba2" else "mamba",
        "vocab_size": -(-vocab // multiple) * multiple,
        "tie_word_embeddings": config.get("tie_embeddings", True),
        "num_heads": channels // size_of(mixer, "headdim", 64),
        "n_groups": mixer.get("ngroups", 1),
    }
    return config | mixer | sizes


def _encoder_decoder(config, shape, usual):
    """T5: two stacks with a norm after each, and tables of relative positions: one of
    each, or of each layer where no activation is usual.
    """
    encoder = shape["layers"]
    key = "num_decoder_layers"
    decoder = require_int(key, config.get(key) or encoder, 1)
    buckets = size_of(config, "relative_attention_num_buckets", 32)
    activation = str(config.get("feed_forward_proj", usual or "gated-gelu"))
    # positions are a number per bucket and head; the encoder has a last norm of its own
    tables = 2 if usual else encoder + decoder
    positions = tables * buckets * shape["heads"]
    return {
        "blocks": ["*-"] * encoder + ["*x-"] * decoder,
        "gated": shape["gated"] or activation.startswith("gated"),
        "other_parameters": positions + shape["hidden"],
    }


def _jamba(config, shape, letter):
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
        ("*" if layer % period == offset else letter)
        + ("E" if layer % every == first else "-")
        for layer in range(shape["layers"])
    ]
    fields = _mixer(config, shape, letter, "mamba_")
    # norms of dt, B and C
    norms = shape["mixer_rank"] + 2 * shape["mixer_state"]
    fields["other_mixer_parameters"] += norms
    return {"blocks": blocks, **fields}


def _mixers(config, shape, letter):
    """A mixer, or attention in the layers of a list, and a feed-forward part, if any."""
    attention = config.get("attn_layer_indices") or []
    if not isinstance(attention, list):
        raise ValueError(
            f"attn_layer_indices={short_repr(attention)} is not a list of layers"
        )
    has_ffn = shape["ffn"] > 0
    second = "-" * has_ffn
    first = ["*" if layer in attention else letter for layer in range(shape["layers"])]
    channels = config.get("mamba_d_ssm" if has_ffn else "intermediate_size")
    mixer = _mixer(config, shape, letter, "mamba_" * has_ffn, channels=channels)
    return {"blocks": [block + second for block in first], **mixer}


def _granite(config, shape, letter):
    """After each mixer or attention experts, where there are any, with a shared one of
    a multiple of their width.
    """
    rope = config.get("position_embedding_type") == "rope"
    return {
        **_mixed(config, shape, letter),
        **_mixer(config, shape, letter, "mamba_"),
        "positions": "rope" if rope else "none",
    }


def _nemotron(config, shape, letter):
    """A block per layer; the shared expert may be as wide as several."""
    pattern = config.get("hybrid_override_pattern")
    types = config.get("layers_block_type") or config.get("layer_types")
    blocks = list(pattern) if isinstance(pattern, str) else _letters(types or [])
    if not blocks or set(blocks) - set("M-*E"):
        raise ValueError(
            f"hybrid_override_pattern={short_repr(pattern)} is not made of M, -, * and E"
        )
    channels = shape["mixer_heads"] * size_of(config, "mamba_head_dim", 64)
    return {"blocks": blocks, **_mixer(config, shape, letter, channels=channels)}


def _mixed(config, shape, letter):
    """Another block, or attention in every n-th layer or those of a list, and a
    feed-forward part or experts.
    """
    count = shape["layers"]
    lists = ("layer_types", "layers_block_type", "attn_type_list")
    types = next((config[key] for key in lists if config.get(key)), None)
    types = types or [not near for near in config.get("hybrid_layer_pattern", [])]
    if full := config.get("linear_full_attn_layers"):  # their numbers, from 1
        types = [layer + 1 in full for layer in range(count)]
    if not types:
        every = require_int("full_every", shape["full_every"], 1)
        types = [(layer + 1) % every == 0 for layer in range(count)]
    _check_count(types, count)
    first = [word if word == "*" else letter for word in _letters(types)]
    dense = shape.get("dense_layers", 0) if shape["experts"] else count
    blocks = [
        block + ("-" if layer < dense else "E")
        for layer, block in enumerate(first[:count])
    ]
    return {"blocks": blocks} | dict.fromkeys(OF_USUAL_STACKS, 0)


def _check_count(words, layers):
    """Raise ValueError for a list of layers that is shorter than the model."""
    if not isinstance(words, list) or len(words) < layers:
        raise ValueError(f"{short_repr(words)} does not list {layers} layers")


def _gemma(config, shape, letter):
    """Gemma 4: experts stand beside the feed-forward part, with three norms, and a scale
    of what is routed. The last layers attend to keys of earlier ones (R and r), with a
    wide feed-forward part; each may have a table of tokens, and behind it a gated part.
    """
    if not config.get("enable_moe_block"):
        shape = shape | {"experts": 0}
    fields = _mixed(config, shape, letter[0])
    blocks = fields["blocks"]
    if shape["experts"]:
        blocks = [word.replace("E", "-E") for word in blocks]
        norms = shape["other_layer_parameters"]
        fields["other_layer_parameters"] = norms + 3 * shape["hidden"]
    if reused := size_of(config, "num_kv_shared_layers", 0, least=0):
        wide = "d" if config.get("use_double_wide_mlp") else "-"
        others = str.maketrans("*w-", f"Rr{wide}")
        blocks[-reused:] = [word.translate(others) for word in blocks[-reused:]]
        fields["block_fields"] = f"{shape['block_fields']} d.ffn={2 * shape['ffn']}"
    usual = 256 * ("p" in letter)
    if width := size_of(config, "hidden_size_per_layer_input", usual, least=0):
        blocks = [word + letter[1:] for word in blocks]
        rows = size_of(config, "vocab_size_per_layer_input", 262_144)
        fields["other_parameters"] = width * (rows * len(blocks) + 1)
    return fields | {"blocks": blocks}


def _gemma_3n(config, shape, letter):
    """Gemma 3n: beside that of Gemma 4 a learned residual (l), and AltUp: router, norm,
    scale and coefficients of a layer, and products of further streams at both ends (u).
    """
    config = {"num_kv_shared_layers": 15} | config
    fields = shape | _gemma(config, shape, letter)
    n = size_of(config, "altup_num_inputs", 4)
    hidden = shape["hidden"]
    coefficients = (n + 2) * hidden + n**2 * (n + 1)
    fields["blocks"][-1] += "u"
    return fields | {
        "block_fields": f"{fields['block_fields']} u.ffn={(n - 1) * hidden} u.gated=0",
        "other_layer_parameters": shape["other_layer_parameters"] + coefficients,
        # that block has no norm
        "other_parameters": fields["other_parameters"] - hidden,
    }


def _compressed(config, shape, letter):
    """Attention to a window and compressed tokens, and the weights of hyper-connections:
    of each block and of the head. The first routers choose by a table, without biases.
    """
    count = shape["layers"]
    types = config.get("compress_ratios") or config.get("layer_types")
    _check_count(types, count)
    first = _letters(types)[:count]
    n = shape["streams"]
    wide = n * shape["hidden"]
    hashed = size_of(config, "num_hash_layers", 3, least=0)
    biases = (count - hashed) * shape["experts"]
    return {
        "blocks": [block + letter for block in first],
        "other_layer_parameters": 2 * (n * (n + 2) * (wide + 1) + 3),
        "other_parameters": n * (wide + 1) + 1 + biases,
    }


def _searched(config, shape, letter):
    """A layer per entry of `block_configs`: attention and a feed-forward part, of sizes
    of its own or left out [Llama-Nemotron, arXiv 2505.00949].
    """
    layers = [_searched_layer(entry, shape) for entry in config["block_configs"]]
    kv_heads, widths = zip(*layers, strict=True)
    attentions = _letters_of(kv_heads, BlockKind.ATTENTION)
    parts = _letters_of(widths, BlockKind.FEED_FORWARD)
    fields = [
        f"{letter}.{field}={size}"
        for field, letters in (("kv_heads", attentions), ("ffn", parts))
        for size, letter in letters.items()
        if letter in FURTHER
    ]
    blocks = [attentions[heads] + parts[width] for heads, width in layers]
    return {
        # what is left without any is no layer
        "blocks": [block for block in blocks if block],
        "block_fields": " ".join(fields),
        "kv_heads": next(iter(attentions)),
        "ffn": next(iter(parts)),
    }


def _searched_layer(entry, shape):
    """Heads of keys and values, and width, of a layer; 0 for a part left out."""
    attention, part = entry["attention"], entry["ffn"]
    if attention.get("replace_with_linear") or part.get("replace_with_linear"):
        raise ValueError("block_configs: replace_with_linear is not modelled")
    kv_heads = width = 0
    if not attention.get("no_op"):
        kv_heads = shape["heads"] // size_of(attention, "n_heads_in_group")
    if not part.get("no_op"):
        # two thirds of a multiple of the channels, in steps of 256
        width = int(2 * part["ffn_mult"] * shape["hidden"] / 3)
        width = -(-width // 256) * 256
    return kv_heads, width


def _letters_of(sizes, kind):
    """Letter of each size: of the commonest that of its kind, of 0 none."""
    others = sorted(letter for letter in FURTHER if BlockKind(letter) == kind)
    common = [size for size, _ in Counter(sizes).most_common() if size]
    return dict(zip(common, [kind, *others], strict=False)) | {0: ""}


def _linear(config, shape, letter):
    """A mixer, or attention, and a feed-forward part or experts."""
    width = shape.get("head_dim") or shape["hidden"] // shape["heads"]
    state = shape.get("mixer_state", width)
    # of a delta net with widths of keys and of values
    values = size_of(config, "linear_value_head_dim", 128) if letter == "G" else state
    # the gate of a shared expert stands in every layer; norms of queries and keys
    more = shape.get("other_layer_parameters", 0)
    more += 2 * state * (letter == "L" and shape.get("qk_norm", False))
    return _mixed(config, shape, letter) | {
        "mixer_channels": shape["mixer_heads"] * values,
        "mixer_state": state,
        "other_mixer_parameters": more,
    }


def _bailing(config, shape, letter):
    """Lightning attention [Ling 2.5], or where there is a convolution Kimi delta
    attention, with gates of full rank unless it says otherwise [Ling 3].
    """
    sizes = {}
    if not config.get("short_conv_kernel_size"):
        sizes = {"mixer_groups": shape["heads"], "head_gate": False}
        letter = "L"
    elif config.get("no_kda_lora") is False:
        letter = "K"
    return sizes | _linear(config, shape | sizes, letter)


def _letters(types):
    try:
        return [WORDS["layers"][str(name)] for name in types]
    except (KeyError, TypeError) as error:
        raise ValueError(f"layer_types: {error} is not modelled") from None


def _mixer(
    config,
    shape,
    letter,
    prefix="",
    channels=None,
):
    """Channels of a mixer and its biases; prefix: of the keys of hybrid models."""
    width = config.get(f"{prefix}expand", 2)
    if isinstance(width, int | float):
        width *= shape["hidden"]
    channels = require_int(f"{prefix}expand x width", channels or width)
    # what the convolution sees: x, of Mamba-2 B and C too; what the first product
    # gives: gate and that, of Mamba-2 dt of the heads too
    convolved = channels
    outputs = 2 * channels
    if "M" in letter:
        groups = 2 * shape["mixer_groups"] * shape["mixer_state"]
        convolved += groups
        outputs += groups + shape["mixer_heads"]
    biases = 0
    if config.get("mamba_conv_bias" if prefix else "use_conv_bias", True):
        biases += convolved
    if config.get("mamba_proj_bias" if prefix else "use_bias", False):
        biases += outputs + shape["hidden"]
    return {"mixer_channels": channels, "other_mixer_parameters": biases}


_STACKS = {
    "encoder-decoder": _encoder_decoder,
    "mixers": _mixers,
    "jamba": _jamba,
    "granite": _granite,
    "nemotron": _nemotron,
    "mixed": _mixed,
    "linear": _linear,
    "searched": _searched,
    "bailing": _bailing,
    "gemma": _gemma,
    "gemma-3n": _gemma_3n,
    "compressed": _compressed,
}
