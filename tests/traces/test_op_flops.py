import json
from math import isnan, prod

import numpy as np
import pandas as pd
import pytest

from madmax_lib.traces.operators.op_flops import operator_costs
from madmax_lib.traces.operators.ops import operators
from madmax_lib.traces.read.kineto import read_trace

torch = pytest.importorskip("torch")
functional = torch.nn.functional
flop_counter = pytest.importorskip("torch.utils.flop_counter")


def randn(*shape):
    return torch.randn(*shape, requires_grad=True)


def qkv():
    return [randn(2, 3, 16, 8) for _ in range(3)]


RECORDED = {
    "mm": lambda: randn(4, 8) @ randn(8, 2),
    "linear": lambda: functional.linear(randn(5, 6, 8), randn(3, 8), randn(3)),
    "linear without bias": lambda: functional.linear(randn(5, 6, 8), randn(3, 8)),
    "bmm": lambda: torch.bmm(randn(7, 4, 8), randn(7, 8, 2)),
    "baddbmm": lambda: torch.baddbmm(randn(7, 4, 2), randn(7, 4, 8), randn(7, 8, 2)),
    "matmul that broadcasts": lambda: randn(3, 1, 4, 8) @ randn(5, 8, 2),
    "einsum": lambda: torch.einsum("bij,bkj->bik", randn(2, 3, 4), randn(2, 5, 4)),
    "conv1d": lambda: functional.conv1d(randn(2, 4, 20), randn(6, 4, 3), padding=1),
    "conv2d": lambda: functional.conv2d(
        randn(2, 4, 20, 18), randn(6, 4, 3, 5), randn(6), stride=2, padding=(1, 2)
    ),
    "dilated": lambda: functional.conv2d(
        randn(2, 4, 20, 18), randn(6, 4, 3, 3), dilation=(2, 3)
    ),
    "same": lambda: functional.conv2d(
        randn(2, 4, 20, 18), randn(6, 4, 3, 3), padding="same"
    ),
    "conv3d": lambda: functional.conv3d(randn(1, 2, 6, 7, 8), randn(3, 2, 2, 2, 2)),
    "unbatched": lambda: functional.conv2d(randn(4, 20, 18), randn(6, 4, 3, 3)),
    "transposed": lambda: functional.conv_transpose2d(
        randn(2, 4, 9, 8), randn(4, 6, 3, 3), stride=2
    ),
    "no gradient of the image": lambda: functional.conv2d(
        torch.randn(2, 4, 9, 8), randn(6, 4, 3, 3)
    ),
    "plain attention": lambda: functional.scaled_dot_product_attention(
        *qkv(), attn_mask=randn(16, 16)
    ),
}


def cost_of(name, shapes, types="", inputs="", strides=""):
    """The only row of `operator_costs`, from the texts of a trace."""
    call = {
        "name": name,
        "shapes": shapes,
        "types": types,
        "inputs": inputs,
        "strides": strides,
    }
    return next(operator_costs(pd.DataFrame([call])).itertuples(index=False))


def cost(name, shapes, dtype="float", types=None, numbers=(), strides=()):
    types = types or [dtype if shape else "Scalar" for shape in shapes]
    texts = [json.dumps(each) if each else "" for each in (numbers, strides)]
    return cost_of(name, json.dumps(shapes), json.dumps(types), *texts)


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_flops_are_those_of_torch(name, tmp_path):
    """Forward and backward through profiler, file and reader; nested operators count
    once.
    """
    torch.manual_seed(0)
    with flop_counter.FlopCounterMode(display=False) as counter:
        RECORDED[name]().sum().backward()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    ) as profile:
        RECORDED[name]().sum().backward()
    profile.export_chrome_trace(str(tmp_path / "rank0.json"))
    table = operators(read_trace(tmp_path / "rank0.json"))
    assert table["flops"].sum() == counter.get_total_flops() > 0


@pytest.mark.parametrize("integer", ["long int", "long long", "__int64", "int64_t"])
def test_integers_of_all_systems_are_read(integer):
    assert (
        cost(
            "aten::add_", [[4, 8], [4, 8], []], types=[integer, integer, "Scalar"]
        ).moved_bytes
        == 3 * 4 * 8 * 8
    )
    assert pd.isna(
        cost("aten::add_", [[], [], []], types=["no", "no", "Scalar"]).moved_bytes
    )


@pytest.mark.parametrize("causal", [False, True])
def test_recorded_attention_counts_as_on_gpus(causal, tmp_path):
    """torch's counter knows the fused kernels of GPUs, not the one of CPUs, and counts
    causal attention dense.
    """
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    ) as profile:
        functional.scaled_dot_product_attention(
            *qkv(), is_causal=causal
        ).sum().backward()
    profile.export_chrome_trace(str(tmp_path / "rank0.json"))
    shape = (2, 3, 16, 8)
    expected = flop_counter.sdpa_flop_count(
        *[shape] * 3
    ) + flop_counter.sdpa_backward_flop_count(*[shape] * 4)
    assert operators(read_trace(tmp_path / "rank0.json"))["flops"].sum() == expected


def test_grouped_convolution_has_the_flops_of_its_products():
    """torch counts the gradient of the weight as if groups were 1."""
    shapes = [[2, 6, 8, 8], [2, 4, 8, 8], [6, 2, 3, 3], [], [], [], [], [], [], [], []]
    numbers = [
        "",
        "",
        "",
        "[0]",
        "[1, 1]",
        "[1, 1]",
        "[1, 1]",
        "False",
        "[0, 0]",
        "2",
        "[True, True, False]",
    ]
    forward = 2 * 2 * 64 * 6 * 2 * 9
    assert (
        cost("aten::convolution_backward", shapes, numbers=numbers).flops == 2 * forward
    )
    with flop_counter.FlopCounterMode(display=False) as counter:
        functional.conv2d(
            randn(2, 4, 8, 8), randn(6, 2, 3, 3), padding=1, groups=2
        ).sum().backward()
    assert counter.get_total_flops() == forward + forward + 2 * forward


@pytest.mark.parametrize(
    ("left", "right", "flops", "out"),
    [
        ([64, 16], [4, 16, 8], 2 * 64 * 16 * 8, 64 * 8),  # tokens sorted by expert
        # gradients of the weights, one matrix an expert
        ([16, 64], [64, 8], 2 * 64 * 16 * 8, 4 * 16 * 8),
        ([4, 5, 16], [16, 64], 2 * 5 * 16 * 64, 5 * 64),
        ([4, 5, 16], [4, 16, 8], 4 * 2 * 5 * 16 * 8, 4 * 5 * 8),
        ([64, 16], [4, 8, 16], None, 0),
    ],
)
def test_grouped_products(left, right, flops, out):
    plain = cost(
        "aten::_grouped_mm",
        [left, right, [4]],
        types=["c10::BFloat16", "c10::BFloat16", "int"],
    )
    eighth = ["c10::Float8_e4m3fn", "c10::Float8_e4m3fn", "float", "float", "int"]
    scaled = cost(
        "aten::_scaled_grouped_mm", [left, right, [64], [8], [4]], types=eighth
    )
    if flops is None:
        assert pd.isna(plain.flops) and pd.isna(scaled.flops)
    else:
        assert plain == (flops, 2 * (prod(left) + prod(right) + out), "bf16")
        assert scaled == (flops, prod(left) + prod(right) + 2 * out, "fp8")


@pytest.mark.parametrize("heads_first", [True, False])
def test_attention_kernels_of_gpus(heads_first):
    """Products as in torch.utils.flop_counter, with fewer heads for keys and another
    width for values.
    """
    q, k, v = (2, 8, 16, 32), (2, 4, 24, 32), (2, 4, 24, 40)
    forward = flop_counter.sdpa_flop_count(q, k, v)
    assert forward == 2 * 2 * 8 * 16 * 24 * (32 + 40)
    name = "_scaled_dot_product_flash_attention" if heads_first else "_flash_attention"
    shapes = [list(s) if heads_first else [s[0], s[2], s[1], s[3]] for s in (q, k, v)]
    out = [*shapes[0][:3], 40]
    found = cost(
        f"aten::{name}{'' if heads_first else '_forward'}", shapes, dtype="c10::Half"
    )
    assert found == (forward, 2 * (sum(map(prod, shapes)) + prod(out)), "fp16")
    backward = cost(f"aten::{name}_backward", [out, *shapes], dtype="c10::Half")
    assert backward.flops == 2 * 2 * 8 * 16 * 24 * (3 * 32 + 2 * 40)
    same = [(2, 8, 16, 32)] * 4
    assert cost(
        "aten::_scaled_dot_product_efficient_attention_backward",
        [list(s) for s in same],
    ).flops == (flop_counter.sdpa_backward_flop_count(*same))


@pytest.mark.parametrize(
    ("name", "shapes", "moved"),
    [
        ("aten::mm", [[4, 8], [8, 2]], 4 * (32 + 16 + 8)),
        # the third is the output, given as out=
        ("aten::mm", [[4, 8], [8, 2], [4, 2]], 4 * (32 + 16 + 8)),
        ("aten::addmm", [[2], [4, 8], [8, 2], [], []], 4 * (2 + 32 + 16 + 8)),
        ("aten::linear", [[3, 4, 8], [2, 8], [2]], 4 * (96 + 16 + 2 + 24)),
        ("aten::add", [[4, 1], [5], []], 4 * (4 + 5 + 20)),
        ("aten::add_", [[4, 5], [5], []], 4 * (20 + 5 + 20)),
        ("aten::mul", [[4, 5], [4, 5], [4, 5]], 4 * 60),  # out= again
        ("aten::addcmul", [[4, 5], [4, 5], [4, 5], []], 4 * 80),
        ("aten::gt", [[4, 5], []], 4 * 20 + 20),
        ("aten::copy_", [[4, 5], [4, 5], []], 4 * 40),
        ("aten::zero_", [[4, 5]], 4 * 20),
        ("aten::sum", [[4, 5], [], []], 4 * 20),
        ("aten::_softmax", [[4, 5], [], []], 4 * 40),
        ("aten::native_layer_norm", [[4, 5], [], [5], [5], []], 4 * (20 + 5 + 5 + 20)),
    ],
)
def test_bytes_are_inputs_and_output(name, shapes, moved):
    assert cost(name, shapes).moved_bytes == moved


@pytest.mark.parametrize("seed", range(8))
def test_strides_span_what_is_read(seed):
    """Of a tensor that torch expands, slices, transposes or unfolds, a copy reads the
    elements that are in memory.
    """
    draw = np.random.default_rng(seed)
    base = torch.arange(int(draw.integers(20, 60)), dtype=torch.float32)
    windows = base.unfold(0, int(draw.integers(1, 9)), int(draw.integers(1, 9)))
    view = (windows.T if seed % 2 else windows).expand(int(draw.integers(1, 5)), -1, -1)
    shapes = [list(view.shape), list(view.shape), []]
    strides = [list(torch.empty(view.shape).stride()), list(view.stride()), []]
    moved = cost("aten::copy_", shapes, strides=strides).moved_bytes
    assert moved == 4 * (view.numel() + len(view.unique()))
    # its output is not expanded
    softmax = cost("aten::_softmax", shapes[1:], strides=strides[1:]).moved_bytes
    assert (
        softmax == moved
        and cost("aten::_softmax", shapes[1:]).moved_bytes == 8 * view.numel()
    )
    assert (
        cost("aten::copy_", shapes, strides=[[1], "x", None]).moved_bytes
        == 8 * view.numel()
    )


@pytest.mark.parametrize(
    ("name", "shapes", "types", "numbers", "moved"),
    [
        (
            "embedding",
            [[1000, 8], [3, 2]],
            ["c10::BFloat16", "long int"],
            ["", ""],
            6 * 8 + 2 * 6 * 8 * 2,
        ),
        (
            "index_select",
            [[1000, 8], [], [6]],
            ["float", "", "long int"],
            ["", "0", ""],
            6 * 8 + 2 * 6 * 8 * 4,
        ),
        (
            "embedding_dense_backward",
            [[3, 2, 8], [3, 2], []],
            ["float", "long int", ""],
            ["", "", "1000"],
            32_240,
        ),
    ],
)
def test_lookups_move_only_their_rows(name, shapes, types, numbers, moved):
    assert (
        cost(f"aten::{name}", shapes, types=types, numbers=numbers).moved_bytes == moved
    )


def test_convolution_bytes():
    shapes = [[2, 4, 9, 9], [6, 4, 3, 3], [6], [], [], [], [], [], []]
    numbers = ["", "", "", "[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1"]
    out = 2 * 6 * 5 * 5
    assert cost("aten::convolution", shapes, numbers=numbers).moved_bytes == 4 * (
        648 + 216 + 6 + out
    )
    assert isnan(cost("aten::convolution", shapes).flops)  # without recorded strides
    numbers = ["", "", "[1, 1]", "[2, 2]", "[1, 1]", "1", "False", "False", "True"]
    assert (
        cost("aten::cudnn_convolution", shapes, numbers=numbers).flops
        == 2 * out * 4 * 9
    )


def test_products_count_without_types_but_bytes_do_not():
    assert cost_of("aten::mm", "[[4,8],[8,2]]")[:1] == (128.0,)
    assert isnan(cost_of("aten::mm", "[[4,8],[8,2]]").moved_bytes)


PACKED = json.dumps([[1, 64, 4, 8]] * 3 + [[], [5], [5]])


@pytest.mark.parametrize(
    ("name", "shapes", "types", "inputs"),
    [
        ("aten::view", "[[4,8],[]]", '["float","ScalarList"]', ""),
        ("mine::mm", "[[4,8],[8,2]]", "", ""),
        ("aten::mm", "[[4,8],[9,2]]", "", ""),
        ("aten::mm", "[[4,8]]", "", ""),
        ("aten::mm", "", "", ""),
        ("aten::mm", "[", "]", ""),
        ("aten::mm", '["a", {"b": 1}]', "[null, 3]", ""),
        ("aten::mm", "[[],[]]", '["float","float"]', ""),
        ("aten::mm", "[[1e400,8],[8,2]]", "", ""),
        ("aten::add", "[[4],[5]]", '["float","float"]', ""),
        ("aten::bmm", "7", "7", "7"),
        (
            "aten::convolution_backward",
            "[[1,2,3],[1,2,3],[1,2,3]]",
            "",
            '["","","","","","","","","","","no"]',
        ),
        (
            "aten::conv2d",
            "[[1,2,9,9],[1,2,3,3],[],[],[],[],[]]",
            "",
            '["","","","[0, 0]","[1, 1]","[1, 1]","1"]',
        ),
        ("aten::_scaled_dot_product_flash_attention", "[[1,2],[3],[4]]", "", ""),
        # packed sequences of unknown lengths
        (
            "aten::_flash_attention_forward",
            "[[64,4,8],[64,4,8],[64,4,8]]",
            '["float","float","float"]',
            "",
        ),
        (
            "aten::_efficient_attention_forward",
            PACKED,
            '["float","float","float","","int","int"]',
            "",
        ),
    ],
)
def test_what_has_no_formula_or_makes_no_sense_is_unknown(name, shapes, types, inputs):
    assert isnan(cost_of(name, shapes, types, inputs).flops)


def test_costs_of_a_table_keep_its_order_and_index():
    names = ["aten::mm", "aten::view", "aten::mm", "aten::mm"]
    shapes = ["[[4,8],[8,2]]", "[[4,8]]", "[[1,2],[2,3]]", "[[4,8],[8,2]]"]
    table = pd.DataFrame(
        {"name": names, "shapes": shapes, "types": "", "inputs": "", "strides": ""},
        index=[7, 5, 3, 1],
    )
    costs = operator_costs(table)
    assert costs.index.tolist() == [7, 5, 3, 1]
    assert costs["flops"].fillna(-1).tolist() == [128, -1, 12, 128]
    assert list(operator_costs(table[:0])) == list(costs) and not len(
        operator_costs(table[:0])
    )
