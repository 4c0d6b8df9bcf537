"""Networks of the catalog's sizes: parameters, attention, experts, stages, low-rank
updates, losses.
"""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from madmax_lib import catalog
from madmax_lib.runs.model import losses, models
from madmax_lib.runs.model.layers import _rotate, _turns
from madmax_lib.runs.model.network import Network, adapt

TOKENS = torch.arange(24).reshape(2, 12) * 11 % 260
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", models.MODELS)
def test_parameters_are_the_catalogs(name):
    spec = models.spec(name)
    assert sum(p.numel() for p in Network(spec).parameters()) == spec.parameters
    if name in catalog.names("models"):
        assert spec == catalog.model(name)


def flops_of(model, recompute="none") -> tuple[int, int]:
    """FLOPs of the products of a forward and of a backward pass over two samples."""
    for _, layer in model.units():
        layer.checkpoint(recompute)
    inputs = IMAGES if model.spec.image else TOKENS
    targets = torch.tensor([0, 1]) if model.spec.image else TOKENS
    with FlopCounterMode(display=False) as forward:
        loss = losses.total(model(inputs), targets)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("name", ["gpt-tiny", "vit-tiny"])
def test_flops_are_the_closed_form_and_recompute_repeats_the_layers(name):
    """But for the last product of each: torch stops once all that the backward pass
    needs is there.
    """
    model = models.build(name, attention="unfused")
    spec, tokens = model.spec, 2 * (model.spec.sequence if model.spec.image else 12)
    forward, backward = flops_of(model)
    assert forward == spec.forward_flops(2, None if spec.image else 12)
    again, full = flops_of(model, "full")
    down = 2 * tokens * spec.hidden * spec.ffn
    ends = 2 * tokens * spec.hidden * spec.vocab
    if spec.image:
        patches = (tokens - 2) * 3 * spec.patch**2
        ends = 2 * spec.hidden * (2 * spec.classes + patches)
    assert again == forward
    assert full - backward == forward - ends - spec.layers * down


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("bias", ["all", "qkv", "none"])
@pytest.mark.parametrize("experts", [0, 4])
def test_parameters_of_other_sizes(norm, gated, bias, experts):
    sizes = {"norm": norm, "gated": gated, "attention_bias": bias, "tied": gated}
    sizes |= {"layers": 3, "experts": experts, "active_experts": 2}
    sizes |= {"mlp_bias": bias == "all", "positions": "learned" if gated else "rope"}
    model = models.build("gpt-tiny", **sizes)
    assert sum(p.numel() for p in model.parameters()) == model.spec.parameters
    assert model(TOKENS).shape == (2, 12, model.spec.vocab)


def test_names_are_kebab_case_and_forgiving():
    assert models.name(" GPT2_Large") == "gpt2-large"
    assert models.name("Qwen2.5_3B") == "qwen2.5-3b"
    assert models.spec("gpt2-large", hidden=64, heads=4).head_dim == 16
    assert models.spec("vit-tiny", image=64).sequence == 257


@pytest.mark.parametrize("name", ["gpt-tiny", "moe-tiny"])
def test_a_token_does_not_see_later_ones(name):
    model = models.build(name, layers=2)
    changed = TOKENS.clone()
    changed[:, 7:] = 5
    torch.testing.assert_close(model(TOKENS)[:, :7], model(changed)[:, :7])
    assert not torch.allclose(model(TOKENS)[:, 7:], model(changed)[:, 7:])


def test_patches_see_each_other():
    model = models.build("vit-tiny", layers=1)
    changed = IMAGES.clone()
    changed[:, :, 28:, 28:] += 1.0
    assert model(IMAGES).shape == (2, 100)
    assert not torch.allclose(model(IMAGES), model(changed))


def test_rotary_positions_keep_lengths_and_depend_on_distance():
    generator = torch.Generator().manual_seed(2)
    vectors = torch.randn(2, 1, 1, 1, 16, generator=generator)
    query, key = vectors.expand(2, 1, 1, 9, 16)
    turns = _turns(9, 16, query.device, query.dtype)
    turned_query, turned_key = _rotate(query, turns), _rotate(key, turns)
    torch.testing.assert_close(turned_query.norm(dim=-1), query.norm(dim=-1))
    scores = (turned_query @ turned_key.transpose(-1, -2))[0, 0]
    # the same pair of vectors at every position: scores are constant on diagonals
    for distance in range(-8, 9):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert not math.isclose(scores[0, 0], scores[0, 5], rel_tol=1e-3)


@pytest.mark.parametrize("width", [96, 90])  # 90 numbers are no multiple of 16 bytes
def test_experts_are_the_sum_over_their_choices(width):
    """Against a loop over tokens."""
    model = models.build("moe-tiny", layers=1, expert_ffn=width)
    mixture = model.layers["0"].feed_forward
    gate, up, down = mixture.experts.gate, mixture.experts.up, mixture.experts.down
    x = torch.randn(1, 7, 64, generator=torch.Generator().manual_seed(3))
    weights, chosen = mixture.router(x[0]).softmax(-1).topk(2)
    weights = weights / weights.sum(-1, keepdim=True)
    for t, token in enumerate(x[0]):
        parts = []
        for weight, e in zip(weights[t], chosen[t], strict=True):
            inner = torch.nn.functional.silu(gate[e] @ token) * (up[e] @ token)
            parts.append(weight * (down[e] @ inner))
        torch.testing.assert_close(mixture(x)[0, t], sum(parts))


def test_low_rank_updates_of_seed_002_and_where_they_start():
    """ViT-Base on CIFAR-100 with rank 16 trains 666,724 parameters, as published."""
    network = Network(models.spec("vit-base", classes=100))
    network.freeze_ends()
    trained = sum(p.numel() for p in network.head.parameters())
    tiny = models.build("vit-tiny", layers=2)
    before = tiny(IMAGES)
    for name, layer in tiny.units():
        adapt(layer, name, 4, seed=0)
    torch.testing.assert_close(tiny(IMAGES), before)
    trained_names = {
        name for name, p in tiny.layers.named_parameters() if p.requires_grad
    }
    assert {name.rsplit(".", 1)[-1] for name in trained_names} == {"down", "up"}
    added = [
        p.numel() for name, p in tiny.layers.named_parameters() if name in trained_names
    ]
    assert sum(added) == 2 * 2 * 4 * (64 + 64)
    assert trained + 12 * 2 * 16 * (768 + 768) == 666_724


def test_masked_targets_count_nothing():
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[1, -100, 2], [-100, -100, 4]])
    log = logits.log_softmax(-1)
    expected = -(log[0, 0, 1] + log[0, 2, 2] + log[1, 2, 4])
    torch.testing.assert_close(losses.total(logits, targets), expected)
    assert losses.correct(logits, logits.argmax(-1)) == 6
    spec = models.spec("gpt-tiny")
    batch = {"tokens": targets, "targets": targets}
    part = losses.split(batch, spec, torch.device("cpu"), dp=2, cp=(2, 3))
    assert (part.samples, part.positions) == (4, 12)
    assert part.targets.tolist() == [[2], [4]]
