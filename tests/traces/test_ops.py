import json
import re
from collections import Counter

import numpy as np
import pandas as pd
import pytest
from support import (
    drawn_cases,
    lanes,
    local_or_skip,
    make_timeline,
    refused_line,
    shows,
    with_columns,
    with_tables,
)

from madmax_lib import catalog, read_trace, simulate
from madmax_lib.timeline.timeline import BUSY_KINDS, Timeline, concat
from madmax_lib.traces import hta
from madmax_lib.traces.operators import ops, roofline
from madmax_lib.traces.read.events import TraceWarning

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:.*no (rank in distributedInfo|step marks|modules)"
    ),
    # in HTA
    pytest.mark.filterwarnings(
        "ignore:Downcasting behavior in `replace`:FutureWarning"
    ),
]
ROOFS = (roofline.roofline, "roof"), (roofline.mfu, "mfu")
ALL_KINDS = ("compute", "comm", "memcpy")
FUNCTIONS = (
    ops.operators,
    ops.modules,
    roofline.roofline,
    roofline.mfu,
    ops.kernels,
)


def fields_of(told: str) -> tuple:
    """Fields of an operator from `shape/shape:type,type~sequence~thread`, ? for no
    shapes.
    """
    if not told:
        return ()
    told, *order = told.split("~")
    shapes, _, types = told.partition(":")
    if shapes == "?":
        return "", "", "", *map(int, order)
    shapes = [[int(n) for n in dims.split("x") if n] for dims in shapes.split("/")]
    types = types.split(",") if "," in types else [types or "float"] * len(shapes)
    return json.dumps(shapes), json.dumps(types), "", *map(int, order)


def traced(drawn: str, operators=(), **meta):
    """Timeline of lanes whose operators have @ and their fields behind them."""
    lines = filter(None, map(str.strip, drawn.splitlines()))
    spans = [span for line in lines for span in line.split(", ")]
    told = [(row, span.rpartition(" @")) for row, span in enumerate(spans)]
    operators = [(row, *fields_of(t)) for row, (_, at, t) in told if at]
    plain = re.sub(r" @.*?(?=, |$)", "", drawn, flags=re.M)
    timeline = make_timeline(lanes(plain), **meta)
    return with_tables(timeline, operators=operators)


def by_name(table, column, name="name"):
    """{name: value}, times in ns."""
    scale = 1e9 if column.endswith("_s") else 1
    values = (table[column] * scale).round(6)
    return dict(zip(table[name], values, strict=True))


NESTED = """
    -1 cpu: outer 0+100 @, inner 10+40 @, l 20+5 #1, l 60+5 #2, l 100+5 #3
    7 compute: a 200+30 #1
    7 memcpy: b 230+7 #2
    7 compute: c 240+5 #3
    7 comm: d 250+4 #9
"""
# one of two products launches a kernel (the other is in a graph), one kernel has none
PARTLY = """
    -1 cpu: aten::mm 0+10 @4x8/8x2, l 2+2 #1, aten::mm 20+10 @4x8/8x2, run 40+20 @?, l 45+2 #2
    7 compute: sgemm 100+{} #1, cutlass_gemm 200+30 #2, elementwise_kernel 300+500 #9
"""
# Linear_1 is recomputed in the backward pass; the view has the number of mm and makes
# no node
MODULES = """
    -1 cpu: nn.Module: Net_0 0+100, nn.Module: Linear_0 14+16, aten::view 12+2 @?~7~0, aten::mm 14+10 @4x8/8x2~7~0
    -1 cpu: launch 15+2 #1, nn.Module: Linear_1 40+20, triton launch 45+2 #2, launch 80+2 #3
    -2 cpu: evaluate_function: MmBackward0 200+50 @?~7~1, aten::mm 205+20 @4x8/8x2, launch 210+2 #4
    -2 cpu: nn.Module: Linear_1 230+10, launch 232+2 #5
    7 compute: k 400+2 #1, k 500+4 #2, k 600+8 #3, k 700+16 #4, k 800+32 #5
"""
OPERATORS = f"""
# a kernel belongs to the innermost operator around its launch
    {NESTED}
    name                  self_device_s ns  device_s ns  host_s ns  self_host_s ns  kernels  share  flops
    inner                 30                30           40         40              1        30/46  -
    outside of operators  9                 9            0          0               2        9/46   -
    outer                 7                 37           100        60              2        7/46   -
# a graph launch starts many kernels
    -1 cpu: replay 0+10 @, cudaGraphLaunch 2+3 #5
    7 compute: k0 20+4 #5, k1 30+4 #5, k2 40+4 #5
    name    device_s ns  kernels
    replay  12           3
# an operator inside of its own name counts its time once
    -1 cpu: norm 0+100 @, norm 10+50 @, l 20+5 #1, norm 100+10 @
    7 compute: k 30+8 #1
    name  count  host_s ns  device_s ns  self_host_s ns
    norm  3      110        8            110
# flops count at the innermost: addmm, not linear; copy_ is part of it, relu_ passes all to clamp_min_
    -1 cpu: aten::linear 0+50 @4x8/2x8, aten::addmm 10+30 @2/4x8/8x2, aten::copy_ 11+5 @8/8, l 20+5 #1
    -1 cpu: aten::relu_ 60+10 @8, aten::clamp_min_ 61+5 @8, aten::mul 80+10 @8/8, aten::copy_ 81+5 @/:float,double
    -1 cpu: l 62+1 #2, l 82+1 #3, l 88+1 #4
    7 compute: gemm 70+16 #1, clamp 90+1 #2, copy 92+1 #3, mul 94+1 #4
    name              flops  moved_bytes      flops_per_s  bytes_per_s  flops_per_byte
    aten::addmm       128    4*(2+32+16+8)    128/16e-9    232/16e-9    128/232
    aten::clamp_min_  -      64               -            64/1e-9      -
    aten::copy_       -      12               -            12/1e-9      -
    aten::mul         -      96               -            96/2e-9      -
    aten::linear      -      -                -            -            -
    aten::relu_       -      -                -            -            -
# rates are of the calls that count
    -1 cpu: aten::mm 0+10 @4x8/8x2, l 1+2 #1, aten::mm 10+10 @?, l 11+2 #2
    7 compute: a 30+4 #1, a 40+60 #2
    name      flops_per_s  device_s ns
    aten::mm  128/4e-9     64
# without a device the time is the host's
    -1 compute: aten::linear 0+50 @?
    -1 cpu: aten::mm 10+32 @4x8/8x2
    -2 comm: gloo:all_reduce 0+99 @8
    name          self_device_s ns  device_s ns  flops_per_s  kernels
    aten::mm      32                32           128/32e-9    0
    aten::linear  18                50           -            0
# a product in a graph has its flops
    {PARTLY.format(10)}
    name                  flops
    outside of operators  -
    run                   -
    aten::mm              128
"""
BY_SHAPE = """
# rates are of the calls that count, by shape
    -1 cpu: aten::mm 0+10 @4x8/8x2, l 1+2 #1, aten::mm 10+10 @?, l 11+2 #2
    7 compute: a 30+4 #1, a 40+60 #2
    shapes            dtype  count
    -                 -      1
    [[4, 8], [8, 2]]  fp32   1
# kernels tell that fp32 was rounded to tf32
    -1 cpu: aten::mm 0+10 @4x8/8x2, l 1+2 #0, aten::mm 10+10 @4x8/8x2, l 11+2 #1
    -1 cpu: aten::mm 20+10 @4x8/8x2:c10::Half, l 21+2 #2
    7 compute: sm80_xmma_gemm_f32f32_tf32f32_f32_nn 50+4 #0
    7 compute: ampere_sgemm_128x64_nn 150+5 #1, a_tf32_kernel_on_halves 250+6 #2
    dtype  device_s ns
    fp16   6
    fp32   5
    tf32   4
# MTIA's aten::mm calls aten::mm with its output: both have the time, one the FLOPs
    -1 cpu: aten::mm 0+20 @4x8/8x2, aten::mm 1+9 @4x8/8x2/4x2, l 2+3 #1
    7 compute: fc 50+8 #1
    shapes                    device_s ns  flops  moved_bytes
    [[4, 8], [8, 2], [4, 2]]  8            128    224
    [[4, 8], [8, 2]]          8            -      -
"""
OF_MODULES = f"""
# kernels of modules, forward and backward
    {MODULES}
    module    device_s ns  self_device_s ns  backward_s ns  flops  count  inside  type    share
    Linear_1  36           4+32              0              0      2      Net_0   Linear  36/62
    Linear_0  18           2+16              16             256    1      Net_0   Linear  18/62
    Net_0     2+4+8+16     8                 16             256    1      -       Net     8/62
# modules on the host
    {MODULES[: MODULES.index("7 compute")]}
    module    device_s ns
    Linear_0  10+50
    Net_0     2+10+50
    Linear_1  0
"""


@pytest.mark.parametrize(("drawn", "expected"), drawn_cases(OPERATORS))
def test_operators(drawn, expected):
    table = ops.operators(traced(drawn))
    shows(table, expected)
    assert table.attrs["source"] == "measured"


@pytest.mark.parametrize(("drawn", "expected"), drawn_cases(BY_SHAPE))
def test_operators_by_shape(drawn, expected):
    shows(ops.operators(traced(drawn), by_shape=True), expected)


@pytest.mark.parametrize(("drawn", "expected"), drawn_cases(OF_MODULES))
def test_modules(drawn, expected):
    shows(ops.modules(traced(drawn)), expected)


def test_ranks_and_threads_do_not_mix():
    """The same times and correlations on another rank, where one launch is on another
    thread than the operators.
    """
    first = traced(NESTED)
    streams = first.spans["stream"].where(first.spans.index != 2, -2)
    spans = first.spans.assign(rank=1, stream=streams)
    other = Timeline(spans, side_tables=first.side_tables)
    timeline = concat([first, other])
    table = ops.operators(timeline).sort_values("rank", kind="stable")
    expected = """
        rank  name                  self_device_s ns
        0     inner                 30
        0     outside of operators  9
        0     outer                 7
        1     outside of operators  39
        1     outer                 7
        1     inner                 0
    """
    shows(table, expected)


def test_a_simulation_shows_its_own_operators():
    drawn = "0 compute: mlp 0+5, mlp 5+6\n2 comm: all_reduce 5+4"
    timeline = traced(drawn, source="simulated", device="a100-80")
    table = ops.operators(timeline)
    shows(table, "name  device_s ns  count\nmlp  11  2\nall_reduce  4  1")
    assert table.attrs["source"] == "simulated"
    table = roofline.mfu(timeline, flops_per_step=11e-9 * 312e12 / 2)
    shows(table, "rank  step  mfu\n0  0  0.5")


WITHOUT = NESTED.replace(" @", "").split("\n", 2)
PARTS = ["", NESTED.replace(" @", ""), "-1 cpu: outer 0+100", WITHOUT[2]]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("drawn", PARTS, ids=["nothing", "all", "no device", "no host"])
def test_missing_data_gives_no_rows_or_nan(function, drawn):
    table = function(traced(drawn))
    whole = function(traced(NESTED.replace("@", "@4x8/8x2"), device="a100-80"))
    assert set(table.columns) == set(whole.columns)
    assert len(table) <= drawn.count("+")
    if "flops" in table:
        assert table["flops"].isna().all()


def test_any_forest_of_spans():
    """Random nested operators against a search over all of them."""
    random = np.random.default_rng(0)
    spans, open_until = [], [400]
    # each inside of what is still open
    for time in sorted(random.integers(0, 390, 80).tolist()):
        open_until = [end for end in open_until if end > time]
        open_until.append(int(random.integers(time, open_until[-1] + 1)))
        spans.append((f"op{len(spans)}", time, open_until[-1]))
    launches = random.integers(0, 400, 60)
    host = [f"{name} {time}+{end - time} @" for name, time, end in spans]
    host += [f"launch {time}+0 #{i}" for i, time in enumerate(launches)]
    kernels = ", ".join(f"k {500 + 10 * i}+{i + 1} #{i}" for i in range(60))
    expected, inclusive = Counter(), Counter()
    for i, launch in enumerate(launches):
        inside = [name for name, time, end in spans if time <= launch < end]
        expected[inside[-1] if inside else ops.OUTSIDE] += i + 1
        inclusive.update(dict.fromkeys(inside, i + 1))
    table = ops.operators(traced(f"-1 cpu: {', '.join(host)}\n7 compute: {kernels}"))
    assert len(spans) > 40 and len(expected) > 10
    own = table[table["self_device_s"] > 0]
    assert by_name(own, "self_device_s") == expected
    within = table[(table["device_s"] > 0) & (table["name"] != ops.OUTSIDE)]
    assert by_name(within, "device_s") == inclusive


@pytest.mark.parametrize(
    ("moved", "bound", "lasts_ns"),
    [(203.9e3, "compute", 2000), (20.39e6, "memory", 20_000)],
)
def test_half_way_to_the_roof(moved, bound, lasts_ns, monkeypatch):
    """A product that takes twice as long as an A100 needs for its FLOPs (1 us) or its
    bytes (10 us).
    """
    costs = {"flops": [312e6], "moved_bytes": [moved], "dtype": ["fp16"]}
    monkeypatch.setattr(ops, "operator_costs", lambda _: pd.DataFrame(costs))
    drawn = f"-1 cpu: aten::mm 0+10 @, l 1+2 #1\n7 compute: a 30+{lasts_ns} #1"
    timeline = traced(drawn, device="NVIDIA A100-SXM4-80GB")
    expected = f"""
        bound    roof  flops_per_byte  peak_flops  peak_bytes_per_s
        {bound}  0.5   312e6/{moved}   312e12      2039e9
    """
    shows(roofline.roofline(timeline), expected)


def test_what_multiplies_nothing_has_no_intensity():
    drawn = "-1 cpu: aten::copy_ 0+10 @1000/1000, l 1+2 #1\n7 compute: a 30+8 #1"
    timeline = traced(drawn)
    table = roofline.roofline(timeline, device="t4")
    shows(table, "flops_per_byte  bound  roof\n0  memory  8000/8e-9/320e9")
    assert table.attrs["device"] == "t4"


DEVICE_NAMES = {"NVIDIA H100 80GB HBM3": "h100-80", "Tesla V100-SXM2-32GB": "v100-32", "a100-80": "a100-80",
                "NVIDIA A100-PG509-200": "a100-40", "AMD Instinct MI300X": "mi300x", "NVIDIA H800": "h800",
                "NVIDIA GB200": "gb200", "NVIDIA GeForce RTX 3090": "rtx-3090", "Tesla T4": "t4",
                "NVIDIA B300 SXM6 AC": "b300", "Tesla P100-PCIE-16GB": "p100"}  # fmt: skip


@pytest.mark.parametrize(("device", "name"), DEVICE_NAMES.items())
def test_devices_by_the_name_in_a_trace(device, name):
    assert roofline._device_of(make_timeline([], device=device)).name == name


MULTIPLIED = re.sub("(outer|inner) (.*?) @", r"aten::mm \2 @4x8/8x2", NESTED)


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("", "the timeline names no device"),
        ("Quadro X", "'Quadro X', the timeline's device, is not in the catalog"),
    ],
)
def test_unknown_devices_have_no_roofs(device, message):
    timeline = traced(MULTIPLIED, device=device)
    for function, share in ROOFS:
        with pytest.warns(
            TraceWarning, match=f"{message}: its peaks are unknown; give device="
        ):
            table = function(timeline)
        assert (table["flops_per_s"] > 0).all() and table[share].isna().all()
        assert function(timeline, device=catalog.device("a100-80"))[share].notna().all()
        with refused_line("unknown device 'h1000'"):
            function(timeline, "h1000")


@pytest.mark.parametrize(("first_ns", "coverage"), [(90, 0.75), (10, 0.25)])
def test_flops_count_where_kernels_ran(first_ns, coverage):
    timeline = traced(PARTLY.format(first_ns), device="v100-32")
    (row,) = roofline.mfu(timeline).itertuples()
    assert (row.flops, row.coverage) == (128, pytest.approx(coverage))
    assert np.isnan(row.mfu) == (coverage < 0.5)
    assert roofline.mfu(timeline, flops_per_step=512)["mfu"][0] > 0


UNKNOWN = {
    "only the host is at work": (
        lambda: traced("-1 compute: aten::mm 0+10 @4x8/8x2", device="v100-32"),
        ROOFS,
    ),
    "profile with record_shapes=True": (
        lambda: traced("-1 cpu: aten::mm 0+10 @, l 2+2 #1\n7 compute: k 10+90 #1"),
        ROOFS[1:],
    ),
    "are unknown: mm.estimate gives the MFU of a simulated step": (
        lambda: simulate("gpt2", "dgx-a100", "dp8", global_batch=8),
        ROOFS[1:],
    ),
}


@pytest.mark.parametrize("message", UNKNOWN)
def test_shares_that_are_unknown_say_why(message):
    timeline, functions = UNKNOWN[message]
    for function, share in functions:
        with pytest.warns(TraceWarning, match=message):
            assert function(timeline())[share].isna().all()


def test_mfu_goes_from_step_to_step():
    """Two products of 128 FLOP in step 0, one in step 1; steps start 50 ns apart, the
    last lasts 20 ns.
    """
    drawn = """
        -1 cpu: aten::mm 0+10 @4x8/8x2, l 0+1 #0, aten::mm 10+10 @4x8/8x2, l 10+1 #1
        -1 cpu: aten::mm 60+10 @4x8/8x2, l 60+1 #2
        7 compute: k 100+20 #0, k 110+20 #1, k 150+20 #2
    """
    timeline = traced(drawn, device="v100-32")
    timeline = with_columns(timeline, step=[0] * 4 + [1] * 2 + [0, 0, 1])
    expected = """
        flops  period_s ns  mfu
        256    50          256/50e-9/15.7e12
        128    20          128/20e-9/15.7e12
    """
    shows(roofline.mfu(timeline), expected)
    given = roofline.mfu(timeline, flops_per_step=512)
    shows(given, "mfu\n512/50e-9/15.7e12\n512/20e-9/15.7e12")


def test_kernel_statistics():
    expected = """
        kind     name  count  total_s ns  mean_s ns  min_s ns  max_s ns  std_s ns  share
        compute  a     2      6           3          2         4         2**0.5    2/3
        comm     b     1      3           3          3         3         -         1/3
    """
    shows(ops.kernels(traced("7 compute: a 0+2, a 5+4\n9 comm: b 0+3")), expected)


HTA_SETS = ["nccl_data", "df_index_resolver", "rank0"]
HTA_KINDS = {"COMPUTATION": "compute", "COMMUNICATION": "comm", "MEMORY": "memcpy"}


@pytest.fixture(scope="module", params=HTA_SETS)
def beside_hta(request):
    """HTA's analysis, and our reading by its rules."""
    path = local_or_skip(f"traces/hta-samples/{request.param}.json.gz")
    return hta.analysis(path), read_trace(path, hta_compatible=True)


def test_kernel_statistics_are_those_of_hta(beside_hta):
    """Of as many kernels as there are. By default HTA 0.5.0 lumps all but ten and then
    gives sums for max and min.
    """
    analysis, timeline = beside_hta
    ours = ops.kernels(timeline).astype({"name": str}).set_index(["kind", "name"])
    everything = {"num_kernels": 10_000, "duration_ratio": 1.0}
    _, theirs = analysis.get_gpu_kernel_breakdown(
        visualize=False, include_memory_kernels=True, **everything
    )
    kinds = theirs["kernel_type"].map(HTA_KINDS)
    theirs.index = pd.MultiIndex.from_arrays([kinds, theirs["name"]])
    assert sorted(theirs.index) == sorted(ours.index)
    for name in ("sum", "max", "min", "mean", "std"):
        column = "stddev" if name == "std" else f"{name} (us)"
        values = theirs[column].astype(float).reindex(ours.index).to_numpy()
        column = "total_s" if name == "sum" else f"{name}_s"
        us = (ours[column] * 1e6).fillna(0).to_numpy()
        assert us == pytest.approx(values, rel=1e-9), name
    _, default = analysis.get_gpu_kernel_breakdown(visualize=False)
    default = default[default["kernel_type"] == "COMPUTATION"].set_index("name")
    default = default.drop("others", errors="ignore")
    longest_s = ours.loc["compute", "max_s"].reindex(default.index)
    assert (default["max (us)"] == default["sum (us)"]).all()
    assert (longest_s * 1e6 < default["max (us)"]).any()


@pytest.fixture(scope="module")
def owlv2():
    return read_trace(local_or_skip("traces/tracelens-samples/owlv2_h100.json.gz"))


def test_a_real_inference_stays_under_the_peaks(owlv2):
    table, device = ops.operators(owlv2), catalog.device("h100-80")
    busy = owlv2.spans[owlv2.spans["kind"].isin(BUSY_KINDS)]
    device_ns = table["self_device_s"].sum() * 1e9
    assert device_ns == pytest.approx(busy["dur_ns"].sum())
    assert table["kernels"].max() > 1000 and ops.OUTSIDE not in set(table["name"])
    assert table["share"].sum() == pytest.approx(1)
    assert 0.5 < table["flops_per_s"].max() / device.peak("bf16") < 0.76
    assert roofline.roofline(owlv2)["roof"].max() < 1.01
    assert roofline.mfu(owlv2)["mfu"].between(0.027, 0.028).all()


def test_modules_of_a_real_inference(owlv2):
    """All of its products run inside of modules, in order of their nesting."""
    table = ops.modules(owlv2).set_index("module")
    whole = table.loc[table["inside"] == "", ["device_s", "flops"]].sum()
    assert whole["flops"] == ops.operators(owlv2)["flops"].sum() > 1e13
    assert table["self_device_s"].sum() == pytest.approx(whole["device_s"])
    assert table.loc["Linear_0":"Linear_0", "flops"].gt(0).all()


@pytest.mark.parametrize("name", ["resnet_act_checkpoint", "train_resnet18"])
def test_the_profiler_names_the_same_operators(name):
    """Kineto writes the operator of a kernel as its External id, also on AMD's default
    stream 0, where HTA loses it.
    """
    timeline = read_trace(local_or_skip(f"traces/tracelens-samples/{name}.json.gz"))
    calls, work = ops.operator_calls(timeline)
    work = work[work["launch_row"] >= 0]
    operator = timeline.spans["op"].to_numpy()
    ours = operator[calls["row"].to_numpy()[work["call"]]]
    assert (ours == operator[work["row"]]).all()
    assert (work["stream"] == 0).sum() > 2000


def test_backward_kernels_of_a_real_training_belong_to_modules():
    path = local_or_skip("traces/tracelens-samples/train_resnet18.json.gz")
    table = ops.modules(read_trace(path)).set_index("module")
    backward_s, device_s = table.loc["ResNet_0", ["backward_s", "device_s"]]
    assert backward_s / device_s == pytest.approx(0.68, abs=0.05)
    products = 3 * 5 * 2 * 512 * 49 * 512 * 512 * 9
    assert table.loc["Conv2d_19", "flops"] == pytest.approx(products)
