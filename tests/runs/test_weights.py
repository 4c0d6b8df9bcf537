"""Hugging Face files of GPT-2, Qwen2 and ViT, as released, under this project's names."""

import json
import struct
from pathlib import Path

import pytest
import torch

from madmax_lib.runs.model import models
from madmax_lib.runs.parallel import trainer
from madmax_lib.runs.spec import RunSpec, check

# shapes of all tensors of a release, by model; {} is a layer's number; hidden 8, ffn 16
SHAPES = json.loads(Path(__file__).with_name("released_shapes.json").read_text())
TINY = {"layers": 2, "hidden": 8, "heads": 2, "ffn": 16}
SIZES = {
    "gpt2-large": TINY | {"vocab": 20, "sequence": 6},
    "qwen2.5-3b": TINY | {"kv_heads": 1, "head_dim": 4, "vocab": 20},
    "vit-tiny": TINY | {"image": 4, "patch": 2, "classes": 3},
}
PLACES = {  # where some of them go: theirs, and what is done to it
    "gpt2-large": {
        "layers.1.attention.key.weight": ("h.1.attn.c_attn.weight", "k.T"),
        "layers.0.attention.value.bias": ("h.0.attn.c_attn.bias", "v"),
        "layers.0.feed_forward.up.weight": ("h.0.mlp.c_fc.weight", "T"),
        "head.weight": ("wte.weight", ""),
    },
    "qwen2.5-3b": {
        "layers.1.attention.key.bias": ("model.layers.1.self_attn.k_proj.bias", ""),
        "norm.weight": ("model.norm.weight", ""),
        "head.weight": ("model.embed_tokens.weight", ""),
    },
    "vit-tiny": {
        "embedding.first": ("vit.embeddings.cls_token", "first"),
        "head.bias": ("classifier.bias", ""),
        "layers.1.feed_forward.down.bias": (
            "vit.encoder.layer.1.output.dense.bias",
            "",
        ),
    },
}
CHANGES = {  # queries, keys and values of GPT-2 are one matrix of (in, out)
    "": lambda t: t,
    "T": lambda t: t.T,
    "k.T": lambda t: t[:, 8:16].T,
    "v": lambda t: t[16:],
    "first": lambda t: t[0, 0],
}


def released(name, make=torch.ones):
    """Tensors of a release by name."""
    tensors = {}
    for pattern, shape in SHAPES[name].items():
        for layer in range(2) if "{}" in pattern else [0]:
            tensors[pattern.format(layer)] = make(shape)
    return tensors


def write_safetensors(path, tensors):
    """The format by its description: length, JSON header, tensors in a row."""
    header = {"__metadata__": {"format": "pt"}}
    content = b""
    for name, tensor in tensors.items():
        begin = len(content)
        content += tensor.numpy().tobytes()
        about = {"dtype": "F32", "shape": list(tensor.shape)}
        header[name] = about | {"data_offsets": [begin, len(content)]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content)


def build(name, folder, tensors=None, **sizes):
    if tensors is not None:
        write_safetensors(folder / "model.safetensors", tensors)
    return models.build(name, weights=folder, **SIZES[name] | sizes)


@pytest.mark.parametrize("name", SIZES)
def test_published_weights_find_their_places(name, tmp_path):
    generator = torch.Generator().manual_seed(5)
    tensors = released(name, lambda shape: torch.randn(shape, generator=generator))
    names = list(tensors)
    for number in (0, 1):  # as shards
        part = {key: tensors[key] for key in names[number::2]}
        write_safetensors(tmp_path / f"model-{number}.safetensors", part)
    model = build(name, tmp_path)
    parameters = list(model.parameters())
    assert sum(p.numel() for p in parameters) == sum(
        t.numel() for t in tensors.values()
    )
    ours = dict(model.named_parameters(remove_duplicate=False))
    for parameter, (theirs, change) in PLACES[name].items():
        expected = CHANGES[change](tensors[theirs])
        assert torch.equal(ours[parameter], expected), parameter
    total = sum(p.double().sum() for p in parameters)
    torch.testing.assert_close(total, sum(t.double().sum() for t in tensors.values()))


def test_a_run_starts_from_published_weights(tmp_path):
    write_safetensors(tmp_path / "model.safetensors", released("vit-tiny"))
    spec = RunSpec("vit-tiny", sizes=SIZES["vit-tiny"], weights=str(tmp_path))
    assert check(spec, gpus=0) == "cpu"
    job = trainer.parallelize(spec.model, spec.plan, spec, sizes=spec.sizes)
    assert all(parameter.eq(1).all() for parameter in job.modules[0].parameters())


def test_published_weights_that_do_not_fit(tmp_path):
    says = r"no \.safetensors file with weights of vit-tiny"
    with pytest.raises(FileNotFoundError, match=says):
        build("vit-tiny", tmp_path)
    tensors = released("vit-tiny")
    # another task: its head is drawn
    other = build("vit-tiny", tmp_path, tensors, classes=7)
    assert other.head.weight.std() > 0 and other.norm.bias.eq(1).all()
    says = r"layernorm_before.weight is \(8,\), not \(4,\)"
    with pytest.raises(ValueError, match=says):
        build("vit-tiny", tmp_path, hidden=4)
    fewer = {key: tensors[key] for key in tensors if "layernorm." not in key}
    with pytest.raises(ValueError, match=r"layernorm.weight is missing"):
        build("vit-tiny", tmp_path, fewer)


@pytest.mark.parametrize("prefix", ["vit.", ""])
def test_a_vision_model_saved_without_a_classifier_gets_one(prefix, tmp_path):
    tensors = {
        prefix + key.removeprefix("vit."): tensor
        for key, tensor in released("vit-tiny").items()
        if "class" not in key
    }
    model = build("vit-tiny", tmp_path, tensors | {"pooler.dense.bias": torch.ones(8)})
    assert model.norm.bias.eq(1).all() and model.head.bias.eq(0).all()
    assert 0 < model.head.weight.std() < 0.1
