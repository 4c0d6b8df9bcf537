"""Configurations of Hugging Face: parameter counts as published, layers as they are,
and what is refused.
"""

import json

import pytest

from madmax_lib import catalog
from madmax_lib.simulator.estimate import estimate

_SHARED = ("layers", "hidden", "heads", "ffn", "vocab", "kv_heads")
_KEYS = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size",
         "num_key_value_heads")  # fmt: skip
_LATENT = {
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "kv_lora_rank": 512,
}
_GPT_OSS = {
    "head_dim": 64,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "attention_bias": True,
}


def experts(count, active, width, *, shared, dense):
    names = (
        "n_routed_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "n_shared_experts",
    )
    return dict(zip(names, (count, active, width, shared), strict=True)) | {
        "first_k_dense_replace": dense
    }


# name: kind, shape in the order of _KEYS, what else the configuration says, parameters
# [model cards and safetensors]
PUBLISHED = {
    "Phi-3-mini": ("phi3", (32, 3072, 32, 8192, 32064, 32), {"sliding_window": 2047}, 3_821_079_552),
    "phi-4": ("phi3", (40, 5120, 40, 17920, 100352, 10), {"sliding_window": None}, 14_659_507_200),
    "gemma-2-2b": ("gemma2", (26, 2304, 8, 9216, 256000, 4), {"head_dim": 256}, 2_614_341_888),
    "gemma-2-9b": ("gemma2", (42, 3584, 16, 14336, 256000, 8), {"head_dim": 256}, 9_241_705_984),
    "gemma-3-1b": ("gemma3_text", (26, 1152, 4, 6912, 262144, 1), {"head_dim": 256}, 999_885_952),
    "OLMo-2-7B": ("olmo2", (32, 4096, 32, 11008, 100352, 32), {}, 7_298_617_344),
    "OLMo-2-13B": ("olmo2", (40, 5120, 40, 13824, 100352, 40), {}, 13_716_198_400),
    "gpt-neox-20b": ("gpt_neox", (44, 6144, 64, 24576, 50432), {}, 20_554_567_680),
    "pythia-6.9b": ("gpt_neox", (32, 4096, 32, 16384, 50432), {}, 6_857_302_016),
    "bert-base": ("bert", (12, 768, 12, 3072, 30522), {"max_position_embeddings": 512}, 109_482_240),
    "bert-large": ("bert", (24, 1024, 16, 4096, 30522), {"max_position_embeddings": 512}, 335_141_888),
    "DeepSeek-V2-Lite": ("deepseek_v2", (27, 2048, 16, 10944, 102400),
                         {"q_lora_rank": None, **_LATENT, **experts(64, 6, 1408, shared=2, dense=1)}, 15_706_484_224),
    "DeepSeek-V3": ("deepseek_v3", (61, 7168, 128, 18432, 129280),
                    {"q_lora_rank": 1536, **_LATENT, **experts(256, 8, 2048, shared=1, dense=3)}, 671_026_419_200),
    "Kimi-K2": ("kimi_k2", (61, 7168, 64, 18432, 163840),
                {"q_lora_rank": 1536, **_LATENT, **experts(384, 8, 2048, shared=1, dense=1)}, 1_026_408_232_448),
    "GLM-4.5-Air": ("glm4_moe", (46, 4096, 96, 10944, 151552, 8),
                    {"head_dim": 128, "attention_bias": True, **experts(128, 8, 1408, shared=1, dense=1)},
                    106_852_251_264),
    "gpt-oss-20b": ("gpt_oss", (24, 2880, 64, 2880, 201088, 8), {"num_local_experts": 32, **_GPT_OSS}, 20_914_757_184),
    "gpt-oss-120b": ("gpt_oss", (36, 2880, 64, 2880, 201088, 8), {"num_local_experts": 128, **_GPT_OSS},
                     116_829_156_672),
    "dinov2-base": ("dinov2", (12, 768, 12), {"image_size": 518, "patch_size": 14}, 86_580_480),
    "Qwen1.5-MoE-A2.7B": ("qwen2_moe", (24, 2048, 16, 5632, 151936, 16),
                          {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
                           "shared_expert_intermediate_size": 5632}, 14_315_784_192),
    "dinov2-giant": ("dinov2", (40, 1536, 24), {"image_size": 518, "patch_size": 14, "use_swiglu_ffn": True},
                     1_136_480_768),
    "dinov2-large": ("dinov2", (24, 1024, 16), {"image_size": 518, "patch_size": 14}, 304_368_640),
}  # fmt: skip


def t5(kind, layers, hidden, heads, ffn, width, parameters, **more):
    sizes = {
        "num_layers": layers,
        "d_model": hidden,
        "num_heads": heads,
        "d_ff": ffn,
        "d_kv": width,
    }
    return kind, sizes | {"vocab_size": 32128, "n_positions": 512} | more, parameters


def nemotron(hidden, heads, ffn, mixers, state, pattern, parameters, **more):
    sizes = {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": ffn,
        "vocab_size": 131072,
    }
    sizes |= {
        "mamba_num_heads": mixers,
        "ssm_state_size": state,
        "num_key_value_heads": 8,
        "n_groups": 8,
    }
    return (
        "nemotron_h",
        sizes
        | {"max_position_embeddings": 8192, "hybrid_override_pattern": pattern}
        | more,
        parameters,
    )


def granite(hidden, heads, ffn, shared, experts, active, mixers, parameters):
    types = ["attention" if layer % 10 == 5 else "mamba" for layer in range(40)]
    sizes = {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": ffn,
        "layer_types": types,
    }
    sizes |= {
        "shared_intermediate_size": shared,
        "num_local_experts": experts,
        "num_experts_per_tok": active,
    }
    sizes |= {
        "mamba_n_heads": mixers,
        "mamba_d_state": 128,
        "vocab_size": 100352,
        "tie_word_embeddings": True,
    }
    key_values = {
        "num_key_value_heads": heads // 3 if heads == 12 else 8,
        "num_hidden_layers": 40,
    }
    return (
        "granitemoehybrid",
        sizes | key_values | {"max_position_embeddings": 4096},
        parameters,
    )


_GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
_JAMBA = {
    "num_key_value_heads": 8,
    "vocab_size": 65536,
    "max_position_embeddings": 262144,
}
# name: kind, configuration as published, parameters [the classes of transformers 5.23;
# those of T5 1.1, Flan and mT5,
# whose head stands apart in their checkpoints, of transformers 4]
STACKS = {
    "t5-small": t5("t5", 6, 512, 8, 2048, 64, 60_506_624),
    "t5-base": t5("t5", 12, 768, 12, 3072, 64, 222_903_552),
    "t5-large": t5("t5", 24, 1024, 16, 4096, 64, 737_668_096),
    "t5-3b": t5("t5", 24, 1024, 32, 16384, 128, 2_851_598_336),
    "t5-11b": t5("t5", 24, 1024, 128, 65536, 128, 11_307_321_344),
    "flan-t5-xl": t5("t5", 24, 2048, 32, 5120, 64, 2_849_757_184, **_GATED),
    "flan-t5-xxl": t5("t5", 24, 4096, 64, 10240, 64, 11_135_332_352, **_GATED),
    "mt5-small": t5("mt5", 8, 512, 6, 1024, 64, 300_176_768, vocab_size=250112, tie_word_embeddings=False),
    "mamba2-2.7b": ("mamba2", {"hidden_size": 2560, "num_hidden_layers": 64, "num_heads": 80, "n_groups": 1,
                               "vocab_size": 50288, "tie_word_embeddings": True}, 2_702_599_680),
    "Mamba-Codestral-7B": ("mamba2", {"hidden_size": 4096, "num_hidden_layers": 64, "vocab_size": 32768},
                           7_285_403_648),
    "mamba-2.8b": ("mamba", {"hidden_size": 2560, "num_hidden_layers": 64, "vocab_size": 50280}, 2_768_345_600),
    "falcon-mamba-7b": ("falcon_mamba", {"hidden_size": 4096, "num_hidden_layers": 64, "vocab_size": 65024,
                                         "tie_word_embeddings": False}, 7_272_665_088),
    "Jamba-v0.1": ("jamba", {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336,
                             "num_attention_heads": 32, **_JAMBA}, 51_570_323_328),
    "Jamba-1.5-Large": ("jamba", {"num_hidden_layers": 72, "hidden_size": 8192, "intermediate_size": 24576,
                                  "num_attention_heads": 64, **_JAMBA}, 398_555_145_696),
    "Nemotron-H-8B": nemotron(4096, 32, 21504, 128, 128, "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
                              8_100_852_736),
    "Nemotron-H-56B": nemotron(8192, 64, 32768, 256, 256, "M-M-M-M*-" + 9 * "M-M-M-M-M*-" + "M-M-M-M-M-",
                               56_324_350_464),
    "Nemotron-3-Nano": nemotron(2688, 32, 1856, 64, 128, "MEMEM*E" + 4 * "MEMEM*E" + "MEMEMEM*EMEMEMEME",
                                31_577_940_288, num_key_value_heads=2, n_routed_experts=128, num_experts_per_tok=6,
                                moe_intermediate_size=1856, moe_shared_expert_intermediate_size=3712),
    "Bamba-9B": ("bamba", {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336,
                           "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
                           "mamba_d_state": 128, "attn_layer_indices": [9, 18, 27],
                           "max_position_embeddings": 4096}, 9_780_235_392),
    "granite-4.0-h-small": granite(4096, 32, 768, 1536, 72, 10, 128, 32_207_337_984),
    "granite-4.0-h-tiny": granite(1536, 12, 512, 1024, 64, 6, 48, 6_939_037_248),
    "granite-4.0-h-micro": granite(2048, 32, 8192, 8192, 0, 0, 64, 3_191_396_096),
}  # fmt: skip


def write(folder, kind, shape, more):
    config = {
        "model_type": kind,
        **dict(zip(_KEYS, shape, strict=False)),
        **({"max_position_embeddings": 4096} | more),
    }
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_published(tmp_path, name):
    kind, shape, more, parameters = PUBLISHED[name]
    model = catalog.model(write(tmp_path, kind, shape, more))
    assert model.parameters == parameters
    assert tuple(getattr(model, field) for field in _SHARED[: len(shape)]) == shape
    assert (
        estimate(model, catalog.cluster("dgx-h100", 4), "dp32.z3", global_batch=32)[
            "step_s"
        ].iloc[0]
        > 0
    )


@pytest.mark.parametrize("name", STACKS)
def test_stacks_of_several_kinds_of_layers_have_the_parameters_published(
    tmp_path, name
):
    kind, config, parameters = STACKS[name]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind} | config))
    model = catalog.model(tmp_path)
    assert (model.parameters, model.layers) == (parameters, len(model.layer_kinds))


def test_configurations_of_mamba_ssm_are_read_too(tmp_path):
    """As in the repositories of state-spaces, whose vocabulary is padded."""
    config = {"d_model": 2560, "n_layer": 64, "vocab_size": 50277, "ssm_cfg": {"layer": "Mamba2"}, "attn_layer_idx": [],
              "pad_vocab_size_multiple": 16, "tie_embeddings": True, "d_intermediate": 0}  # fmt: skip
    first = {
        "d_model": 2560,
        "n_layer": 64,
        "vocab_size": 50277,
        "ssm_cfg": {},
        "pad_vocab_size_multiple": 8,
    }
    for read, name in ((config, "mamba2-2.7b"), (first, "mamba-2.8b")):
        (tmp_path / "config.json").write_text(json.dumps(read))
        assert catalog.model(tmp_path).parameters == STACKS[name][2]
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"attn_layer_idx": [9, 18]})
    )
    with pytest.raises(
        ValueError, match="attention or feed-forward parts among the mixers of ssm_cfg"
    ):
        catalog.model(tmp_path)


def test_layers_of_a_stack_are_those_of_its_configuration(tmp_path):
    words = {
        "t5-small": ("*- " * 6 + "*x- " * 6).strip(),
        "Jamba-v0.1": "m- mE m- mE *- mE m- mE",
        "mamba2-2.7b": "M",
    }
    words["granite-4.0-h-tiny"] = "ME ME ME ME ME *E ME ME ME ME"
    words["Nemotron-H-8B"] = " ".join(
        STACKS["Nemotron-H-8B"][1]["hybrid_override_pattern"]
    )
    for name, blocks in words.items():
        (tmp_path / "config.json").write_text(
            json.dumps({"model_type": STACKS[name][0]} | STACKS[name][1])
        )
        assert catalog.model(tmp_path).blocks == blocks


@pytest.mark.parametrize(
    "key",
    [
        "vocab_size",
        "intermediate_size",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "v_head_dim",
    ],
)
def test_a_size_of_zero_is_none(tmp_path, key):
    kind, shape, more, _ = PUBLISHED["DeepSeek-V3"]
    path = write(tmp_path, kind, shape, more)
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: 0}))
    with pytest.raises(ValueError, match=f"{key}=0 is no size"):
        catalog.model(path)


def test_layers_of_a_window_in_turn_with_all_tokens(tmp_path):
    kind, shape, more, _ = PUBLISHED["gemma-3-1b"]
    sliding, full = "sliding_attention", "full_attention"
    for types in (None, ([sliding] * 5 + [full]) * 4 + [sliding] * 2):
        model = catalog.model(
            write(
                tmp_path,
                kind,
                shape,
                more | {"sliding_window": 512, "layer_types": types},
            )
        )
        assert [model.layer_window(layer) for layer in (0, 4, 5, 11, 12)] == [
            512,
            512,
            0,
            0,
            512,
        ]
    with pytest.raises(
        ValueError,
        match=r"layer_types: full attention in layers \[1, 26\] is not every n-th",
    ):
        catalog.model(
            write(
                tmp_path,
                kind,
                shape,
                more | {"layer_types": [full] + [sliding] * 24 + [full]},
            )
        )


def test_of_images_and_text_the_text_is_read(tmp_path):
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gemma3", "text_config": text})
    )
    with pytest.warns(UserWarning, match="the text part alone is read"):
        model = catalog.model(tmp_path / "config.json")
    assert (model.parameters, model.heads, model.full_every) == (
        3_880_263_168,
        8,
        6,
    )  # the rest are its kind's defaults
    scout = {"num_hidden_layers": 48, "hidden_size": 5120, "num_attention_heads": 40, "num_key_value_heads": 8,
             "head_dim": 128, "intermediate_size": 8192, "intermediate_size_mlp": 16384, "vocab_size": 202048,
             "num_local_experts": 16, "num_experts_per_tok": 1, "max_position_embeddings": 4096}  # fmt: skip
    for step, experts, parameters in (
        (1, 16, 107_769_861_120),
        (2, 128, 400_711_848_960),
    ):  # Scout and Maverick
        text = scout | {"interleave_moe_layer_step": step, "num_local_experts": experts}
        (tmp_path / "config.json").write_text(
            json.dumps({"model_type": "llama4", "text_config": text})
        )
        with pytest.warns(UserWarning, match="the text part alone is read"):
            model = catalog.model(tmp_path / "config.json")
        assert (
            model.parameters == parameters and 17.1e9 < model.active_parameters < 17.3e9
        )  # 17B active, says the card
        assert [model.is_mixture(layer) for layer in (0, 1, 46, 47)] == [
            step == 1,
            True,
            step == 1,
            True,
        ]


@pytest.mark.parametrize(
    ("sizes", "parameters"),
    [
        ({}, 92_884_224),
        (
            {
                "hidden_size": 1152,
                "intermediate_size": 4304,
                "num_hidden_layers": 27,
                "num_attention_heads": 16,
                "image_size": 384,
                "patch_size": 14,
            },
            428_225_600,
        ),
    ],
)
def test_of_siglip_the_images_are_read(tmp_path, sizes, parameters):
    """base-patch16-224 and so400m-patch14-384, whose 384 pixels are 27 patches of 14
    and a rest.
    """
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "siglip", "vision_config": sizes})
    )
    with pytest.warns(UserWarning, match="the image part alone is read"):
        assert catalog.model(tmp_path).parameters == parameters


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("bart", "an encoder with biases, positions and norms of its own"),
        ("zamba2", "layers that share weights"),
        ("falcon_h1", "state-space and attention side by side in a layer"),
        ("qwen3_next", "linear attention or convolutions"),
        ("nobody", "is not one of gpt2, vit, dinov2, bert"),
    ],
)
def test_what_cannot_be_said_is_refused_with_a_way_out(tmp_path, kind, reason):
    with pytest.raises(
        ValueError,
        match=(
            f"{reason}.*Transformer.'mine', layers=2, hidden=64, heads=2, ffn=256, "
            "vocab=100"
        ),
    ):
        catalog.model(write(tmp_path, kind, (2, 64, 2, 256, 100), {}))
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": kind, "d_model": 512, "num_layers": 6, "d_ff": 2048})
    )
    with pytest.raises(
        ValueError,
        match=r"layers=6, hidden=512, heads=..., ffn=2048, vocab=..., sequence=...",
    ):
        catalog.model(tmp_path)


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        (
            "Nemotron-H-8B",
            {"hybrid_override_pattern": "MZ"},
            "hybrid_override_pattern='MZ' is no text of M",
        ),
        ("Nemotron-3-Nano", {"moe_latent_size": 8}, "experts of a latent"),
        (
            "granite-4.0-h-tiny",
            {"layer_types": ["conv"] * 40},
            "layer_types: 'conv' is not modelled",
        ),
        (
            "granite-4.0-h-tiny",
            {"shared_intermediate_size": 700},
            "shared_intermediate_size=700 is no multiple",
        ),
        (
            "Jamba-v0.1",
            {"attn_layer_period": 0},
            "attn_layer_period=0 must be a whole number above zero",
        ),
        ("mamba2-2.7b", {"n_groups": 7}, "mixer_groups=7 must divide"),
        ("t5-small", {"num_layers": "six"}, "layers='six' must be a whole number"),
        (
            "Bamba-9B",
            {"attn_layer_indices": 9},
            "attn_layer_indices=9 is no list of layers",
        ),
        (
            "t5-small",
            {"num_decoder_layers": "six"},
            "num_decoder_layers='six' must be a whole number",
        ),
    ],
)
def test_a_stack_that_no_words_say_is_refused(tmp_path, name, change, reason):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": STACKS[name][0]} | STACKS[name][1] | change)
    )
    with pytest.raises(ValueError, match=reason):
        catalog.model(tmp_path)


def test_a_list_is_no_configuration(tmp_path):
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match="an object of JSON"):
        catalog.model(tmp_path / "config.json")
