"""Hugging Face files of GPT-2, Qwen2 and ViT, as released, under this project's names."""

import json
import struct

import pytest
import torch

from madmax_lib.runs.model import models

# shapes of a layer's tensors, {} its number; hidden 8, ffn 16
GPT2 = {
    "h.{}.ln_1": (8,), "h.{}.attn.c_attn": (8, 24), "h.{}.attn.c_proj": (8, 8),
    "h.{}.ln_2": (8,), "h.{}.mlp.c_fc": (8, 16), "h.{}.mlp.c_proj": (16, 8),
}  # fmt: skip
QWEN2 = {
    "self_attn.q_proj": (8, 8), "self_attn.k_proj": (4, 8), "self_attn.v_proj": (4, 8), "self_attn.o_proj": (8, 8),
    "input_layernorm": (8,), "post_attention_layernorm": (8,),
    "mlp.gate_proj": (16, 8), "mlp.up_proj": (16, 8), "mlp.down_proj": (8, 16),
}  # fmt: skip
VIT = {
    "attention.attention.query": (8, 8), "attention.attention.key": (8, 8), "attention.attention.value": (8, 8),
    "attention.output.dense": (8, 8), "intermediate.dense": (16, 8), "output.dense": (8, 16),
    "layernorm_before": (8,), "layernorm_after": (8,),
}  # fmt: skip


def layers(shapes, prefix, biased, bias=-1):
    """Tensors of two layers; those that are biased have one as long as their dimension
    `bias`.
    """
    names = [((prefix + name).format(i), name) for i in range(2) for name in shapes]
    weights = {f"{full}.weight": shapes[name] for full, name in names}
    return weights | {
        f"{full}.bias": (shapes[name][bias],) for full, name in names if biased(name)
    }


ENDS = {"cls_token": (1, 1, 8), "position_embeddings": (1, 5, 8)}
ENDS |= {
    "patch_embeddings.projection.weight": (8, 3, 2, 2),
    "patch_embeddings.projection.bias": (8,),
}
TINY = {"layers": 2, "hidden": 8, "heads": 2, "ffn": 16}
RELEASED = {  # sizes, shapes of the tensors, and where some of them go
    "gpt2-large": (
        TINY | {"vocab": 20, "sequence": 6},
        layers(
            GPT2, "", biased=lambda name: True
        )  # matrices are (in, out); queries, keys and values one of them
        | {
            "wte.weight": (20, 8),
            "wpe.weight": (6, 8),
            "ln_f.weight": (8,),
            "ln_f.bias": (8,),
        },
        {
            "layers.1.attention.key.weight": (
                "h.1.attn.c_attn.weight",
                lambda t: t[:, 8:16].T,
            ),
            "layers.0.attention.value.bias": ("h.0.attn.c_attn.bias", lambda t: t[16:]),
            "layers.0.feed_forward.up.weight": ("h.0.mlp.c_fc.weight", lambda t: t.T),
            "head.weight": ("wte.weight", None),
        },
    ),
    "qwen2.5-3b": (
        TINY | {"kv_heads": 1, "head_dim": 4, "vocab": 20},
        layers(
            QWEN2,
            "model.layers.{}.",
            biased=lambda name: name.endswith(("q_proj", "k_proj", "v_proj")),
            bias=0,
        )
        | {"model.embed_tokens.weight": (20, 8), "model.norm.weight": (8,)},
        {
            "layers.1.attention.key.weight": (
                "model.layers.1.self_attn.k_proj.weight",
                None,
            ),
            "norm.weight": ("model.norm.weight", None),
            "head.weight": ("model.embed_tokens.weight", None),
        },
    ),
    "vit-tiny": (
        TINY | {"image": 4, "patch": 2, "classes": 3},
        layers(VIT, "vit.encoder.layer.{}.", biased=lambda name: True, bias=0)
        | {f"vit.embeddings.{name}": shape for name, shape in ENDS.items()}
        | {"vit.layernorm.weight": (8,), "vit.layernorm.bias": (8,)}
        | {"classifier.weight": (3, 8), "classifier.bias": (3,)},
        {
            "embedding.first": ("vit.embeddings.cls_token", lambda t: t[0, 0]),
            "head.bias": ("classifier.bias", None),
            "layers.1.feed_forward.down.weight": (
                "vit.encoder.layer.1.output.dense.weight",
                None,
            ),
        },
    ),
}


def write_safetensors(path, tensors):
    """The format by its description: length, JSON header, tensors in a row."""
    header, parts, offset = {"__metadata__": {"format": "pt"}}, [], 0
    for name, tensor in tensors.items():
        raw = tensor.numpy().tobytes()
        header[name] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + len(raw)],
        }
        parts.append(raw)
        offset += len(raw)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))


@pytest.mark.parametrize("name", RELEASED)
def test_published_weights_find_their_places(name, tmp_path):
    sizes, shapes, places = RELEASED[name]
    generator = torch.Generator().manual_seed(5)
    tensors = {
        key: torch.randn(shape, generator=generator) for key, shape in shapes.items()
    }
    names = list(tensors)
    for place, part in enumerate((names[::2], names[1::2])):  # as shards
        write_safetensors(
            tmp_path / f"model-{place}.safetensors", {key: tensors[key] for key in part}
        )
    model = models.build(name, weights=tmp_path, **sizes)
    assert sum(p.numel() for p in model.parameters()) == sum(
        t.numel() for t in tensors.values()
    )
    own = dict(model.named_parameters(remove_duplicate=False))
    for ours, (theirs, change) in places.items():
        assert torch.equal(
            own[ours], change(tensors[theirs]) if change else tensors[theirs]
        ), ours
    total = sum(p.double().sum() for p in model.parameters())
    torch.testing.assert_close(total, sum(t.double().sum() for t in tensors.values()))


def test_a_run_starts_from_published_weights(tmp_path):
    from madmax_lib.runs.parallel import trainer
    from madmax_lib.runs.spec import RunSpec, check

    sizes, shapes, _ = RELEASED["vit-tiny"]
    write_safetensors(
        tmp_path / "model.safetensors",
        {key: torch.ones(shape) for key, shape in shapes.items()},
    )
    spec = RunSpec("vit-tiny", sizes=sizes, weights=str(tmp_path))
    assert check(spec, gpus=0) == "cpu"
    job = trainer.parallelize(spec.model, spec.plan, spec, sizes=spec.sizes)
    assert all(parameter.eq(1).all() for parameter in job.modules[0].parameters())


def test_published_weights_that_do_not_fit(tmp_path):
    sizes, shapes, _ = RELEASED["vit-tiny"]
    with pytest.raises(
        FileNotFoundError, match=r"no \.safetensors file with weights of vit-tiny"
    ):
        models.build("vit-tiny", weights=tmp_path, **sizes)
    tensors = {key: torch.ones(shape) for key, shape in shapes.items()}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    other = models.build(
        "vit-tiny", weights=tmp_path, **sizes | {"classes": 7}
    )  # another task: its head is drawn
    assert other.head.weight.std() > 0 and other.norm.bias.eq(1).all()
    with pytest.raises(
        ValueError, match=r"layernorm_before.weight is \(8,\), not \(4,\)"
    ):
        models.build("vit-tiny", weights=tmp_path, **sizes | {"hidden": 4})
    write_safetensors(
        tmp_path / "model.safetensors",
        {key: tensors[key] for key in tensors if "layernorm." not in key},
    )
    with pytest.raises(ValueError, match=r"layernorm.weight is missing"):
        models.build("vit-tiny", weights=tmp_path, **sizes)


@pytest.mark.parametrize("prefix", ["vit.", ""])
def test_a_vision_model_saved_without_a_classifier_gets_one(prefix, tmp_path):
    sizes, shapes, _ = RELEASED["vit-tiny"]
    inner = {
        prefix + key.removeprefix("vit."): torch.ones(shape)
        for key, shape in shapes.items()
        if "class" not in key
    }
    write_safetensors(
        tmp_path / "model.safetensors", inner | {"pooler.dense.bias": torch.ones(8)}
    )
    model = models.build("vit-tiny", weights=tmp_path, **sizes)
    assert (
        model.norm.bias.eq(1).all()
        and 0 < model.head.weight.std() < 0.1
        and model.head.bias.eq(0).all()
    )
