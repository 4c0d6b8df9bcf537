"""The words of a configuration that say what is trained: Megatron-LM's flags,
torchtitan's names, and Hugging Face's.

They stand beside the plan so that a configuration can be launched; a reader lists them
as harmless.
"""

from madmax_lib import catalog
from madmax_lib.catalog import Transformer
from madmax_lib.plan_flags.keys import WORDS

MADE_UP = WORDS["megatron_made_up"]  # until data is given
_TITAN = WORDS["torchtitan_configs"]  # module, config function
# keys of Bridge that are not the flag with underscores
_BRIDGE = WORDS["bridge_renamed"]
# Bridge works them out from others
_NOT_OF_BRIDGE = ("group-query-attention", "max-position-embeddings")
# flags that turn off what the key of Bridge turns on
_NEGATED = WORDS["bridge_negated"]


def without_off(flags: dict) -> dict:
    """The flags that are set: neither None nor False."""
    return {k: v for k, v in flags.items() if v is not None and v is not False}


def megatron_sizes(model: Transformer, sequence: int) -> dict:
    """Flags of pretrain_gpt.py, or of pretrain_vision_classify.py for images.

    Raises ValueError for layers of several kinds, and for parts side by side.
    """
    if model.blocks or model.shared_norm:
        raise ValueError(
            f"{model.name}: Megatron's flags of layers {' '.join(model.kinds)} are "
            "not written; leave out model"
        )
    is_grouped = model.kv_heads < model.heads
    # of latent attention the widths of heads have flags of their own
    is_usual_width = model.head_dim * model.heads == model.hidden or model.kv_lora_rank
    is_rope = model.positions == "rope"
    flags = _listed("megatron-lm", model) | {
        "group-query-attention": is_grouped,
        "num-query-groups": model.kv_heads if is_grouped else None,
        "kv-channels": None if is_usual_width else model.head_dim,
        "max-position-embeddings": sequence,
        "normalization": "RMSNorm" if model.norm == "rms" else None,
        "position-embedding-type": "rope" if is_rope else "learned_absolute",
        "disable-bias-linear": not model.mlp_bias,
        "add-qkv-bias": model.attention_bias == "qkv",
        "untie-embeddings-and-output-weights": not (model.tied or model.image),
        "multi-latent-attention": model.kv_lora_rank > 0,
    }
    if model.experts:
        flags |= _mixture(model)
    if model.index_heads:
        flags["experimental-attention-variant"] = "dsa"
    elif model.window:
        # tokens before, tokens after
        flags["window-size"] = f"{model.window},0"
        flags["softmax-type"] = "learnable" if model.sinks else None
    return without_off(flags)


def _listed(framework, model):
    """Sizes that a model has by the keys of `data/size_flags.csv`."""
    rows = catalog.table("size_flags").query("framework == @framework")
    sizes = {
        row.key: getattr(model, row.field)
        for row in rows.itertuples()
        if not row.where or getattr(model, row.where)
    }
    return {key: size for key, size in sizes.items() if size}


def _mixture(model):
    layers = None  # all are mixtures
    if model.moe_every > 1:
        layers = f"'{_mixtures(model)}'".replace(" ", "")
    elif model.dense_layers:
        layers = f"'([0]*{model.dense_layers}+[1]*{model.moe_layers})'"
    # by a bias of the choice alone, DeepSeek-V3's way [arXiv 2412.19437, 2.1.2]
    is_balanced = model.router_bias and not model.mlp_bias
    return {
        "moe-grouped-gemm": True,
        "moe-token-dispatcher-type": "alltoall",
        "moe-shared-expert-intermediate-size": model.shared_experts * model.expert_ffn
        or None,
        "moe-router-enable-expert-bias": is_balanced,
        "moe-router-score-function": "sigmoid" if is_balanced else None,
        "moe-layer-freq": layers,
    }


def _mixtures(model):
    """1 for each layer that is a mixture, else 0."""
    return [int(blocks.has_experts) for blocks in model.layer_kinds]


def bridge_sizes(model: Transformer, sequence: int) -> dict:
    """The same as keys of the section of the model in a recipe's overrides."""
    flags = megatron_sizes(model, sequence)
    sizes = {key: not flags.pop(name, False) for name, key in _NEGATED.items()}
    for name, value in flags.items():
        if name not in _NOT_OF_BRIDGE:
            sizes[_BRIDGE.get(name, name.replace("-", "_"))] = value
    # lists, which a command line writes as texts
    if "moe-layer-freq" in flags:
        sizes["moe_layer_freq"] = _mixtures(model)
    if "window-size" in flags:
        sizes["window_size"] = [model.window, 0]
    return sizes


def titan_config(model: Transformer) -> dict:
    """Module and config function of torchtitan; none for a model that has none of just
    its sizes.
    """
    # a model of that name with other sizes has no config function
    if model.name not in _TITAN or catalog.model(model.name) != model:
        return {}
    # the flags --module and --config
    return dict(zip(("module", "config"), _TITAN[model.name], strict=True))


def named_sizes(model: Transformer) -> dict:
    """Sizes by Hugging Face's names, for a script that makes the model of them."""
    sizes = _listed("hugging-face", model)
    if model.blocks:
        sizes["blocks"] = ",".join(model.layer_kinds)
    return sizes | {"model": "-".join(model.name.split())}
