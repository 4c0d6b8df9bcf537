"""Which words of a configuration say what is trained? Megatron-LM's flags, torchtitan's
names, and Hugging Face's.

They stand beside the plan so that a configuration can be launched; a reader lists them
as harmless.
"""

from __future__ import annotations

from madmax_lib import catalog
from madmax_lib.catalog.models import Transformer

__all__ = ["MADE_UP", "bridge_sizes", "megatron_sizes", "named_sizes", "titan_config"]

MADE_UP = {
    "mock-data": True,
    "tokenizer-type": "NullTokenizer",
    "train-iters": 20,
    "lr": 1e-4,
}  # until data is given
_TITAN = {
    f"llama3-{size}": ("llama3", f"llama3_{size}") for size in ("8b", "70b", "405b")
}  # module, config function
_TITAN |= {
    "deepseek-v2-lite": ("deepseek_v3", "deepseek_v3_16b"),
    "deepseek-v3": ("deepseek_v3", "deepseek_v3_671b"),
}
_BRIDGE = {"swiglu": "gated_linear_unit", "num-experts": "num_moe_experts"}
_NOT_OF_BRIDGE = (
    "group-query-attention",
    "max-position-embeddings",
)  # it follows from others
_TURNED = {"disable-bias-linear": "add_bias_linear"}
_TURNED["untie-embeddings-and-output-weights"] = "share_embeddings_and_output_weights"


def megatron_sizes(model: Transformer, sequence: int) -> dict:
    """Flags of pretrain_gpt.py, or of pretrain_vision_classify.py for images.

    Raises ValueError for layers of several kinds.
    """
    if model.blocks:
        raise ValueError(
            f"{model.name}: Megatron's flags of layers {' '.join(model.kinds)} are "
            "not written; leave out model"
        )
    flags: dict = {
        "num-layers": model.layers,
        "hidden-size": model.hidden,
        "ffn-hidden-size": model.ffn or None,
    }
    flags |= {
        "num-attention-heads": model.heads,
        "group-query-attention": model.kv_heads < model.heads,
    }
    flags |= {
        "num-query-groups": model.kv_heads if model.kv_heads < model.heads else None
    }
    own_width = model.head_dim * model.heads != model.hidden and not model.kv_lora_rank
    flags |= {
        "kv-channels": model.head_dim if own_width else None,
        "max-position-embeddings": sequence,
    }
    flags |= {
        "normalization": "RMSNorm" if model.norm == "rms" else None,
        "swiglu": model.gated,
    }
    flags |= {
        "position-embedding-type": "rope"
        if model.positions == "rope"
        else "learned_absolute"
    }
    flags |= {
        "disable-bias-linear": not model.mlp_bias,
        "add-qkv-bias": model.attention_bias == "qkv",
    }
    flags |= {
        "qk-layernorm": model.qk_norm,
        "untie-embeddings-and-output-weights": not model.tied,
    }
    flags |= _latent_attention(model) | _mixture(model)
    if model.window:
        skipped = model.full_every or None
        flags |= {"window-size": f"{model.window},0", "window-attn-skip-freq": skipped}
        flags |= {"softmax-type": "learnable" if model.sinks else None}
    if model.image:
        edges = {
            "img-h": model.image,
            "img-w": model.image,
            "patch-dim": model.patch,
            "num-classes": model.classes,
        }
        flags |= edges | {"untie-embeddings-and-output-weights": False}
    else:
        flags["vocab-size"] = model.vocab
    return {
        name: value
        for name, value in flags.items()
        if value is not None and value is not False
    }


def _latent_attention(model: Transformer) -> dict:
    if not model.kv_lora_rank:
        return {}
    flags = {"multi-latent-attention": True, "q-lora-rank": model.q_lora_rank or None}
    flags |= {
        "kv-lora-rank": model.kv_lora_rank,
        "qk-head-dim": model.head_dim,
        "v-head-dim": model.v_head_dim,
    }
    return flags | {"qk-pos-emb-head-dim": model.rope_head_dim}


def _mixture(model: Transformer) -> dict:
    if not model.experts:
        return {}
    flags = {
        "num-experts": model.experts,
        "moe-router-topk": model.active_experts,
        "moe-grouped-gemm": True,
    }
    flags |= {
        "moe-ffn-hidden-size": model.expert_ffn,
        "moe-token-dispatcher-type": "alltoall",
    }
    flags |= {
        "moe-shared-expert-intermediate-size": model.shared_experts * model.expert_ffn
        or None
    }
    dense = (
        f"'([0]*{model.dense_layers}+[1]*{model.moe_layers})'"
        if model.dense_layers
        else None
    )
    dense = f"'{_kinds(model)}'".replace(" ", "") if model.moe_every > 1 else dense
    balanced = (
        model.router_bias and not model.mlp_bias
    )  # by a bias of the choice alone, DeepSeek-V3's way
    flags |= {
        "moe-router-enable-expert-bias": balanced,
        "moe-router-score-function": "sigmoid" if balanced else None,
    }
    return flags | {"moe-layer-freq": dense}


def _kinds(model: Transformer) -> list[int]:
    """1 for each layer that is a mixture, else 0."""
    return [int(model.is_mixture(layer)) for layer in range(model.layers)]


def bridge_sizes(model: Transformer, sequence: int) -> dict:
    """The same as keys of the section of the model in a recipe's overrides."""
    flags = megatron_sizes(model, sequence)
    sizes = {key: not flags.pop(name, False) for name, key in _TURNED.items()}
    sizes |= {
        _BRIDGE.get(n, n.replace("-", "_")): value
        for n, value in flags.items()
        if n not in _NOT_OF_BRIDGE
    }
    sizes |= {"moe_layer_freq": _kinds(model)} if "moe-layer-freq" in flags else {}
    return sizes | ({"window_size": [model.window, 0]} if model.window else {})


def titan_config(model: Transformer) -> dict:
    """Module and config function of torchtitan; none for a model that has none of just
    its sizes.
    """
    if model.name not in _TITAN or catalog.model(model.name) != model:
        return {}
    return dict(zip(("module", "config"), _TITAN[model.name], strict=True))


def named_sizes(model: Transformer) -> dict:
    """Sizes by Hugging Face's names, for a script that makes the model of them."""
    sizes = {
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn or None,
    }
    sizes |= {"num_attention_heads": model.heads, "num_key_value_heads": model.kv_heads}
    sizes |= {
        "vocab_size": model.vocab or None,
        "image_size": model.image or None,
        "patch_size": model.patch or None,
    }
    if model.experts:
        sizes |= {
            "num_experts": model.experts,
            "num_experts_per_tok": model.active_experts,
        }
        sizes |= {"moe_intermediate_size": model.expert_ffn}
    if model.blocks:
        sizes |= {"blocks": ",".join(model.layer_kinds)}
    return sizes | {"model": "-".join(model.name.split())}
