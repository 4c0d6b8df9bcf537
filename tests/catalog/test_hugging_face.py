"""Configurations of Hugging Face: parameter counts as published, layers as they are,
and what is refused.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from simulator.test_agreement import closed_s, laid_out_s
from support import cells, refused, rows_beside

from madmax_lib import catalog
from madmax_lib.plan import Case, Plan
from madmax_lib.plan_flags.sizes import megatron_sizes
from madmax_lib.simulator.estimate import estimate
from madmax_lib.simulator.memory.memory import memory, peak_bytes

# name: (configuration, parameters). [Model cards and safetensors; for stacks of several
# kinds of layers the classes of transformers 5.23, for T5 1.1, Flan and mT5, whose head
# stands apart in their checkpoints, those of transformers 4.]
ROWS = rows_beside(__file__, "configurations")
PUBLISHED = {name: (config, parameters) for name, config, parameters in ROWS}
SEEING = [name for name, config, _ in ROWS if "vision_config" in config]
FIELDS = {
    "num_hidden_layers": "layers",
    "hidden_size": "hidden",
    "num_attention_heads": "heads",
    "intermediate_size": "ffn",
    "vocab_size": "vocab",
    "num_key_value_heads": "kv_heads",
}


SERVERS = catalog.cluster("dgx-h100", 4)


def searched(word):
    """Entries of `block_configs`: "8:5.25x2" has two of groups of 8 heads and that
    multiple of the width; 0 leaves a part out.
    """
    sizes, _, count = word.partition("x")
    group, multiple = map(float, sizes.split(":"))
    attention = {"no_op": not group, "n_heads_in_group": int(group) or None}
    part = {"no_op": not multiple, "ffn_mult": multiple or None}
    return [{"attention": attention, "ffn": part}] * int(count or 1)


@pytest.fixture
def read(tmp_path):
    """Reads a configuration: that of a published model, or of a kind, with changes."""

    def model(name, **changes):
        kind = {"model_type": name} if name else {}
        config = PUBLISHED.get(name, (kind,))[0] | changes
        types = {"m": "mamba", "a": "attention"}
        if isinstance(config.get("layer_types"), str):
            config["layer_types"] = [types[c] for c in config["layer_types"]]
        if isinstance(config.get("block_configs"), str):
            words = config["block_configs"].split()
            config["block_configs"] = [
                layer for word in words for layer in searched(word)
            ]
        (tmp_path / "config.json").write_text(json.dumps(config))
        return catalog.model(tmp_path)

    return model


@pytest.mark.filterwarnings("ignore:.*AltUp")
@pytest.mark.parametrize("name", [name for name in PUBLISHED if name not in SEEING])
def test_parameters_are_those_published(read, name):
    config, parameters = PUBLISHED[name]
    model = read(name)
    assert model.parameters == parameters
    shape = {field: config[key] for key, field in FIELDS.items() if key in config}
    if name in catalog.names("models"):  # such as "vit-base"; a stack has several kinds
        assert model.parameters == catalog.model(name).parameters
    if model.blocks:
        assert model.layers == len(model.layer_kinds)
    else:
        assert {field: getattr(model, field) for field in shape} == shape
    cluster = catalog.cluster("dgx-h100", 4)
    sequence = None if model.image or model.sequence else 4096
    table = estimate(model, cluster, "dp32.z3", global_batch=32, sequence=sequence)
    assert table["step_s"].item() > 0


@pytest.mark.parametrize("name", SEEING)
def test_models_of_images_and_text_have_a_tower(read, name):
    """Its work stands in the first stage, alike in both forms of a step."""
    with pytest.warns(UserWarning, match="with one image of [0-9]+ pixels a sample"):
        model = read(name)
    assert model.parameters == PUBLISHED[name][1]
    plan = Plan(dp=16, tp=2, zero=1)
    cases = {
        images: Case(replace(model, images=images), SERVERS, plan, 32, 4096)
        for images in (0.0, 1.0, 4.0)
    }
    steps = {images: closed_s(case) for images, case in cases.items()}
    assert steps[0] < steps[1] < steps[4]
    assert laid_out_s(cases[4]) == pytest.approx(steps[4], rel=0.01)
    weights = model.tower.parameters + model.projector_parameters
    flops = [case.model.forward_flops(1, 4096) for case in cases.values()]
    # scores and values of all layers, and 2 FLOPs per weight and patch, but that merged
    # patches share the projector's
    patches = model.tower.sequence
    scores = 4 * patches**2 * model.tower.hidden * model.tower.layers
    share = (flops[1] - flops[0] - scores) / (2 * patches * weights)
    assert 0.7 < share < 1


# As in the repositories of state-spaces, whose vocabulary is padded.
MAMBA_1 = {"d_model": 2560, "n_layer": 64, "vocab_size": 50277, "ssm_cfg": {}}
MAMBA_2 = MAMBA_1 | {"ssm_cfg": {"layer": "Mamba2"}, "d_intermediate": 0}


@pytest.mark.parametrize(
    ("config", "multiple", "name"),
    [(MAMBA_2, 16, "mamba2-2.7b"), (MAMBA_1, 8, "mamba-2.8b")],
)
def test_configurations_of_mamba_ssm_are_read_too(read, config, multiple, name):
    config = config | {"pad_vocab_size_multiple": multiple, "tie_embeddings": True}
    assert read(None, **config).parameters == PUBLISHED[name][1]
    with refused("attention or feed-forward parts & mixers of ssm_cfg"):
        read(None, **config, attn_layer_idx=[9, 18])


@pytest.mark.parametrize(
    ("name", "blocks"),
    cells("""
    t5-small | *- *- *- *- *- *- *x- *x- *x- *x- *x- *x-
    Jamba-v0.1 | m- mE m- mE *- mE m- mE
    mamba2-2.7b | M
    granite-4.0-h-tiny | ME ME ME ME ME *E ME ME ME ME
    gemma-4-26B-A4B | w-E w-E w-E w-E w-E *-E
    Falcon-H1-34B | M*-
    """),
)
def test_layers_of_a_stack_are_those_of_its_configuration(read, name, blocks):
    assert read(name).blocks == blocks


def test_a_pattern_is_said_layer_by_layer(read):
    pattern = PUBLISHED["Nemotron-H-8B"][0]["hybrid_override_pattern"]
    assert read("Nemotron-H-8B").blocks == " ".join(pattern)


SLIDING = ["sliding_attention"]
FULL = ["full_attention"]


@pytest.mark.parametrize("types", [None, (SLIDING * 5 + FULL) * 4 + SLIDING * 2])
def test_layers_of_a_window_in_turn_with_all_tokens(read, types):
    model = read("gemma-3-1b", sliding_window=512, layer_types=types)
    windows = [model.layer_window(layer) for layer in (0, 4, 5, 11, 12)]
    assert windows == [512, 512, 0, 0, 512]


def test_a_window_is_said_by_blocks_too(read):
    """Alike in parameters, FLOPs, memory and both forms of a step."""
    usual = read("gemma-3-1b", num_hidden_layers=24, sliding_window=512)
    stack = replace(usual, full_every=0, blocks="w- w- w- w- w- *-")
    cases = [
        Case(model, SERVERS, Plan(dp=8, pp=4), 32, 4096) for model in (usual, stack)
    ]
    assert usual.parameters == stack.parameters
    assert usual.forward_flops(2) == stack.forward_flops(2)
    tables = [memory(model, "dp8.pp4", sequence=4096) for model in (usual, stack)]
    assert peak_bytes(tables[0]) == pytest.approx(peak_bytes(tables[1]))
    assert laid_out_s(cases[0]) == pytest.approx(laid_out_s(cases[1]))
    assert closed_s(cases[1]) == pytest.approx(laid_out_s(cases[1]), rel=0.01)
    for part in ("w.head=8", "x.heads=8", "w.heads", "w.heads=-8"):
        with refused(f"is not made of such as w.heads=8: {part}", "block_fields"):
            replace(stack, block_fields=part)


@pytest.mark.parametrize(
    ("name", "full", "near"),
    cells("""
    gemma-4-31B | 32 4 512 512 | 32 16 256 256
    MiMo-V2-Flash | 64 4 192 128 | 64 8 192 128
    Step-3.5-Flash | 64 8 128 128 | 96 8 128 128
    DeepSeek-V4-Flash | 64 1 512 512 | 64 1 512 512
    """),
)
def test_heads_differ_between_a_window_and_all_tokens(read, name, full, near):
    model = read(name)
    for attention, sizes in ((model, full), (model.variants["w"], near)):
        names = ("heads", "kv_heads", "head_dim", "v_head_dim")
        assert [getattr(attention, field) for field in names] == [
            *map(int, sizes.split())
        ]
    cases = [Case(model, SERVERS, Plan(dp=4, tp=8, zero=1), 32, 8192)]
    assert closed_s(cases[0]) == pytest.approx(laid_out_s(cases[0]), rel=0.01)


TINY = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
TINY |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128}
TABLES = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128}
LATENTS = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16}
LATENTS |= {"v_head_dim": 16, "first_k_dense_replace": 2, "short_conv_kernel_size": 4}


@pytest.mark.parametrize(
    ("kind", "layers", "sizes", "parameters", "flops"),
    [
        (
            "falcon_h1",
            2,
            {"mamba_d_ssm": 96, "mamba_n_heads": 6, "mamba_d_state": 16},
            121_188,
            90_570_752,
        ),
        (
            "bailing_hybrid",
            6,
            LATENTS
            | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
            419_860,
            153_616_384,
        ),
        (
            "gemma4_text",
            12,
            TABLES | {"num_kv_shared_layers": 6, "use_double_wide_mlp": True},
            1_134_136,
            1_812_987_904,
        ),
        # without the 8,273,920 of AltUp's products, as the warning says
        (
            "gemma3n_text",
            10,
            TABLES | {"num_kv_shared_layers": 5, "laurel_rank": 12},
            369_240,
            347_078_656,
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*AltUp")
def test_flops_are_those_of_transformers(read, kind, layers, sizes, parameters, flops):
    """Of 256 tokens, as torch's FlopCounterMode has them for tiny models of the classes
    of transformers 5.24 but for scans, which kernels do in another order; experts, which
    it does not see, come on top.
    """
    sizes = TINY | {"num_hidden_layers": layers, "max_position_embeddings": 512} | sizes
    tiny = read(kind, **sizes)
    terms = tiny.flops_by_term(256, windows=False)
    assert tiny.parameters == parameters
    assert sum(terms.values()) - terms.get("scan", 0) == flops


def test_keys_of_an_earlier_layer_are_kept_once(read):
    """Its activations are less by as many channels; scores are the same."""
    model = read("gemma-4-E4B")
    full, reused = (model.variants.get(letter, model) for letter in ("w", "r"))
    channels = 2 * full.kv_heads * full.head_dim
    less = channels * model.hidden + full.head_dim
    assert full.attention_parameters - reused.attention_parameters == less
    kept = [
        memory(
            replace(model, blocks=word), "dp1", sequence=4096, software="megatron-core"
        )
        .set_index("component")
        .loc["activations", "size_bytes"]
        for word in ("w-p", "r-p")
    ]
    assert kept[0] - kept[1] == 2 * 4096 * channels * model.layers
    cases = [Case(model, SERVERS, Plan(dp=8, tp=2, pp=2), 32, 4096)]
    assert closed_s(cases[0]) == pytest.approx(laid_out_s(cases[0]), rel=0.01)


def test_what_a_kind_lacks_is_said(read):
    with pytest.warns(UserWarning, match="AltUp's predictions") as caught:
        read("gemma-3n-E4B")
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("name", "layers", "kinds", "widths"),
    [
        ("Llama-3.3-Nemotron-Super-49B", 80, 8, "28672 7168 5632 14336 2816 17920"),
        (
            "Llama-3.1-Nemotron-Ultra-253B",
            81,
            15,
            "53248 26624 21504 16128 37376 32000",
        ),
    ],
)
def test_layers_of_a_search_have_widths_of_their_own(read, name, layers, kinds, widths):
    """Ultra has 81 more without any part, whose widths stand in four layers."""
    model = read(name)
    assert (model.layers, len(model.kinds)) == (layers, kinds)
    letters = "-012345"[: len(widths.split())]
    sizes = [model.variants.get(letter, model).ffn for letter in letters]
    assert sizes == [*map(int, widths.split())]
    case = Case(
        model, catalog.cluster("dgx-h100", 16), Plan(dp=4, tp=4, pp=8), 128, 4096
    )
    assert closed_s(case) == pytest.approx(laid_out_s(case), rel=0.02)
    with refused("replace_with_linear is not modelled"):
        [linear] = searched("0:0")
        linear["attention"]["replace_with_linear"] = True
        read(name, block_configs=[linear])


def test_attention_of_a_search_may_have_heads_of_its_own(read):
    """Parameters, FLOPs and memory of a layer are those of a model of such layers."""
    name = "Llama-3.3-Nemotron-Super-49B"
    few, many, both = (
        read(name, block_configs=words) for words in ("8:1x4", "16:2x4", "8:1x2 16:2x2")
    )
    assert both.blocks == "*- *- A0 A0"
    assert both.block_fields == "A.kv_heads=4 0.ffn=11008"
    for amount in (
        lambda model: model.parameters,
        lambda model: model.forward_flops(1, 4096),
        lambda model: peak_bytes(memory(model, "tp4", sequence=4096)),
    ):
        assert 2 * amount(both) == pytest.approx(amount(few) + amount(many), rel=1e-3)


@pytest.mark.parametrize(
    ("name", "key", "value", "more"),
    [
        ("gpt2-large", "tie_word_embeddings", False, 64_328_960),
        ("Qwen1.5-MoE-A2.7B", "qkv_bias", False, -147_456),
        ("stablelm-2-1.6b", "use_parallel_residual", True, -98_304),
        ("gemma-4-26B-A4B", "enable_moe_block", False, -22_849_140_480),
        ("Step-3.5-Flash", "moe_layers_enum", [*range(2, 45)], 4_408_344_864),
        ("Qwen3-Next-80B-A3B", "attention_bias", True, 135_168),
        ("gemma-4-31B", "hidden_size_per_layer_input", 256, 4_274_580_736),
        ("Falcon-H1-34B", "mamba_rms_norm", True, 294_912),
    ],
)
def test_keys_change_parameters_as_in_transformers(read, name, key, value, more):
    """By the classes of transformers 5.24, with and without."""
    assert read(name, **{key: value}).parameters == PUBLISHED[name][1] + more


def test_kinds_that_are_like_another_have_its_defaults(read):
    """Layers that attend to all tokens, where no list says which."""
    sizes = {"num_hidden_layers": 8, "hidden_size": 64, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 96, "vocab_size": 128, "max_position_embeddings": 64}
    assert read("qwen3_5_text", **sizes).blocks == "G- G- G- *-"


@pytest.mark.parametrize(
    ("name", "changes", "field", "value"),
    [
        ("MiMo-V2-Flash", {"swa_head_dim": 256}, "head_dim", 256),
        ("MiMo-V2-Flash", {"swa_num_attention_heads": 32}, "heads", 32),
        (
            "Step-3.5-Flash",
            {"attention_other_setting": {"num_attention_groups": 4}},
            "kv_heads",
            4,
        ),
    ],
)
def test_sizes_of_windowed_attention_have_keys_of_their_own(
    read, name, changes, field, value
):
    near = read(name, **changes).variants["w"]
    assert getattr(near, field) == value


def test_tp_shares_out_the_heads_of_both_kinds_of_layers(read):
    """64 divides the heads of all tokens, and not the 96 of a window."""
    with refused("tp=64 does not divide 32 attention heads"):
        model = read("Step-3.5-Flash")
        Plan(tp=64).check(model, catalog.cluster("dgx-h100", 8), 8, 8192)


def test_compressed_tokens_and_streams_count(read):
    """FLOPs as torch's FlopCounterMode has them for the class of transformers 5.24, with
    eager attention; that of experts, which it does not see, comes on top.
    """
    sizes = {
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "head_dim": 32,
        "q_lora_rank": 24,
        "o_groups": 2,
        "o_lora_rank": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "index_n_heads": 4,
        "index_head_dim": 16,
        "vocab_size": 512,
        "compress_ratios": [0, 128, 4, 128, 4, 0],
    }
    tiny = read("DeepSeek-V4-Flash", **sizes)
    assert tiny.parameters == 586_665
    terms = tiny.flops_by_term(256, windows=False)
    assert sum(terms.values()) - terms["experts"] == 356_253_696
    model = read("DeepSeek-V4-Flash")
    single = replace(model, streams=1)
    stored = [
        memory(one, "dp1", sequence=4096, software="megatron-core")
        .set_index("component")
        .loc["activations", "size_bytes"]
        for one in (model, single)
    ]
    # four more of 16 bits enter each of both blocks
    assert stored[0] - stored[1] == model.layers * 2 * 4 * 2 * 4096 * model.hidden
    cases = [Case(one, SERVERS, Plan(dp=8, pp=4), 32, 4096) for one in (model, single)]
    steps = [closed_s(case) for case in cases]
    assert 1.02 < steps[0] / steps[1] < 1.1
    assert steps[0] == pytest.approx(laid_out_s(cases[0]), rel=0.03)
    with refused("context parallelism is not modelled"):
        Plan(dp=16, cp=2).check(model, SERVERS, 32, 4096)


def test_one_norm_for_both_parts_is_one_less(read):
    """Parameters, and what the norm of a feed-forward part keeps: its input and, for the
    product, its result.
    """
    model = read("command-r7b")
    usual = replace(model, shared_norm=False)
    assert usual.parameters - model.parameters == model.layers * model.hidden
    tables = [
        memory(one, "dp1", sequence=4096, software="megatron-core")
        for one in (usual, model)
    ]
    kept = [table.set_index("component")["size_bytes"] for table in tables]
    vector_bytes = 2 * 4096 * model.hidden * model.layers
    saved = kept[0]["activations"] - kept[1]["activations"]
    assert saved == 2 * vector_bytes
    with refused("Megatron's flags & not written"):
        megatron_sizes(model, 4096)


# What it says itself are its sizes; the rest are the defaults of its kind.
GEMMA = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
SCOUT = dict(
    zip(FIELDS, (48, 5120, 40, 8192, 202048, 8), strict=True),
    head_dim=128,
    intermediate_size_mlp=16384,
    num_experts_per_tok=1,
    max_position_embeddings=4096,
)
SIGLIP = dict(zip(FIELDS, (27, 1152, 16, 4304), strict=False), image_size=384)


def of_text(read, kind, config):
    with pytest.warns(UserWarning, match="only the text part is read"):
        return read(kind, text_config=config)


def test_of_an_omni_model_the_text_of_the_thinker_is_read(read):
    name = "qwen3-30b-a3b"
    text = PUBLISHED[name][0] | {"model_type": "qwen3_omni_moe_text"}
    thinker = {"model_type": "qwen3_omni_moe_thinker", "text_config": text}
    with pytest.warns(UserWarning, match="only the text part is read"):
        model = read("qwen3_omni_moe", thinker_config=thinker)
    assert model.parameters == PUBLISHED[name][1]


def test_of_images_and_text_the_text_is_read(read):
    model = of_text(read, "gemma3", GEMMA | {"sliding_window": 1024})
    assert model.parameters == 3_880_263_168
    assert (model.heads, model.full_every) == (8, 6)


@pytest.mark.parametrize(
    ("step", "experts", "parameters"),
    [(1, 16, 107_769_861_120), (2, 128, 400_711_848_960)],
    ids=["Scout", "Maverick"],
)
def test_every_nth_layer_is_a_mixture(read, step, experts, parameters):
    mixtures = {"interleave_moe_layer_step": step, "num_local_experts": experts}
    model = of_text(read, "llama4", SCOUT | mixtures)
    assert model.parameters == parameters
    assert 17.1e9 < model.active_parameters < 17.3e9  # 17B active, says the card
    first = step == 1
    mixed = [model.is_mixture(layer) for layer in (0, 1, 46, 47)]
    assert mixed == [first, True, first, True]


@pytest.mark.parametrize(
    ("sizes", "parameters"),
    [({}, 92_884_224), (SIGLIP | {"patch_size": 14}, 428_225_600)],
    ids=["base-patch16-224", "so400m-patch14-384"],
)
def test_of_siglip_the_images_are_read(read, sizes, parameters):
    """384 pixels are 27 patches of 14 and a rest."""
    with pytest.warns(UserWarning, match="only the image part is read"):
        assert read("siglip", vision_config=sizes).parameters == parameters


MINE = dict(zip(FIELDS, (2, 64, 2, 256, 100), strict=False))
OTHER_KEYS = {"d_model": 512, "num_layers": 6, "d_ff": 2048}


@pytest.mark.parametrize(
    ("kind", "reason"),
    cells("""
    bart | an encoder with biases, positions and norms of its own
    zamba2 | layers that share weights
    lfm2 | short convolutions in place of attention
    mllama | attention to images & the nearest that can be read is llama
    """),
)
@pytest.mark.parametrize(
    ("config", "way_out"),
    [
        (MINE, "Transformer('mine', layers=2, hidden=64, heads=2, ffn=256, vocab=100"),
        (OTHER_KEYS, "layers=6, hidden=512, heads=..., ffn=2048, vocab=..., sequence="),
    ],
)
def test_what_cannot_be_said_is_refused_with_a_way_out(
    read, kind, reason, config, way_out
):
    with refused(reason, way_out):
        read(kind, **config)


@pytest.mark.parametrize(
    ("name", "key", "value", "rule"),
    [
        ("granite-4.0-h-tiny", "layer_types", ["conv"] * 40, "'conv' & not modelled"),
        ("gemma-3-1b", "layer_types", FULL + SLIDING * 24 + FULL, "[1, 26] & n-th"),
        ("gemma-3-1b", "hidden_size_per_layer_input", 256, "tables of their own"),
        ("DeepSeek-V3", "attention_bias", 1, "biases of latents are not modelled"),
        ("gemma-4-26B-A4B", "per_layer_config", {"5": {"top_k_experts": 2}}, "top_k"),
        ("vit-base", "num_channels", 4, "num_channels=4"),
        *cells("""
        DeepSeek-V3 | vocab_size | 0 | =0 & not a size
        DeepSeek-V3 | intermediate_size | 0 | =0 & not a size
        DeepSeek-V3 | kv_lora_rank | 0 | =0 & not a size
        DeepSeek-V3 | qk_nope_head_dim | 0 | =0 & not a size
        DeepSeek-V3 | v_head_dim | 0 | =0 & not a size
        Nemotron-H-8B | hybrid_override_pattern | MZ | ='MZ' & not made of M
        Nemotron-3-Nano | moe_shared_expert_intermediate_size | 8 | width 8 & multiple
        granite-4.0-h-tiny | shared_intermediate_size | 700 | width 700 & multiple
        Jamba-v0.1 | attn_layer_period | 0 | =0 & whole number above zero
        mamba2-2.7b | n_groups | 7 | mixer_groups=7 & divide
        t5-small | num_layers | six | layers='six' & whole number
        Bamba-9B | attn_layer_indices | 9 | =9 & list of layers
        t5-small | num_decoder_layers | six | ='six' & whole number
        """),
    ],
)
def test_a_configuration_that_no_model_has_is_refused(read, name, key, value, rule):
    named = () if "shared" in key or key == "n_groups" else (key.removeprefix("num_"),)
    with refused(rule, *named):
        read(name, **{key: value})


@pytest.mark.parametrize(
    ("name", "key", "rule"),
    cells("""
    gemma-4-26B-A4B | per_layer_config | not of the kind & 'values'
    MiMo-V2-Flash | hybrid_layer_pattern | not of the kind & not iterable
    DeepSeek-V4-Flash | compress_ratios | 3 does not list 43 layers
    """),
)
def test_a_number_in_place_of_a_list_is_refused(read, name, key, rule):
    with refused(rule):
        read(name, **{key: 3})


@pytest.mark.parametrize(
    ("name", "key", "words"),
    [
        ("gemma-4-31B", "layer_types", ["full_attention"] * 20),
        ("MiMo-V2-Flash", "hybrid_layer_pattern", [1, 0, 1]),
        ("DeepSeek-V4-Flash", "compress_ratios", [0, 4, 128]),
    ],
)
def test_a_list_of_fewer_layers_is_refused(read, name, key, words):
    with refused("does not list"):
        read(name, **{key: words})


def test_a_kind_that_nobody_knows_is_read_as_llama_where_its_keys_are(read):
    said = "'nobody' is unknown and read like Llama's"
    with pytest.warns(UserWarning, match=said) as caught:
        model = read("nobody", **MINE)
    assert caught[0].filename == __file__  # the line that asked
    assert (
        model.parameters == read("llama", max_position_embeddings=8, **MINE).parameters
    )
    with refused("'ssm_width' is not a key of Llama's & nearest by name: gemma4"):
        read("gemma_4", ssm_width=3, **MINE)
    with refused("no model has 1000000000 channels"):
        read("gpt2", n_embd=10**9, n_layer=2, n_head=2, n_positions=8, vocab_size=9)


@pytest.mark.parametrize(("groups", "nodes"), [(8, 4), (1, 0)])
def test_one_group_of_all_experts_limits_no_nodes(read, groups, nodes):
    model = read("DeepSeek-V3", n_group=groups, topk_group=4)
    assert model.routed_nodes == nodes


def test_an_adapter_is_named(read):
    with refused("an adapter (LORA) of meta-llama/Llama-3.1-8B & lora_rank"):
        base = {"base_model_name_or_path": "meta-llama/Llama-3.1-8B"}
        read(None, peft_type="LORA", r=16, **base)


def test_a_list_is_no_configuration(tmp_path):
    (tmp_path / "config.json").write_text("[1]")
    with refused("a JSON object"):
        catalog.model(tmp_path / "config.json")


def test_a_name_of_the_catalog_is_no_folder(tmp_path, monkeypatch):
    """Checkpoints lie in folders called as their models are."""
    monkeypatch.chdir(tmp_path)
    for name in ("llama3-8b", "checkpoint"):
        (tmp_path / name).mkdir()
        shape = {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 100}
        config = {"model_type": "gpt2", "n_positions": 32, **shape}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    (tmp_path / "gpt2").mkdir()  # and some are empty
    own = catalog.model("checkpoint")
    with pytest.warns(UserWarning, match="is the catalog's; ./llama3-8b"):
        assert catalog.model("llama3-8b").parameters == 8_030_261_248
    for name in ("./llama3-8b", "llama3-8b/", Path("llama3-8b"), "checkpoint"):
        assert catalog.model(name).parameters == own.parameters
    assert catalog.model("gpt2").parameters == 124_439_808
