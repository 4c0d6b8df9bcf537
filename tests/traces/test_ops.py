import numpy as np
import pandas as pd
import pytest
from support import lanes, local_or_skip, make_timeline, with_columns, with_tables

from madmax_lib import catalog, read_trace, simulate
from madmax_lib.timeline.timeline import BUSY_KINDS, concat
from madmax_lib.traces import hta
from madmax_lib.traces.operators import ops, roofline
from madmax_lib.traces.read.events import TraceWarning

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*no rank in distributedInfo"),
    pytest.mark.filterwarnings(
        "ignore:Downcasting behavior in `replace`:FutureWarning"
    ),  # in HTA
]
MM = ("[[4,8],[8,2]]", '["float","float"]', "")
FUNCTIONS = (
    ops.operators,
    ops.modules,
    roofline.roofline,
    roofline.mfu,
    ops.kernels,
    ops.kernel_types,
)


def traced(rows, operators=(), **meta):
    """Timeline of (rank, stream, kind, name, start_ns, dur_ns, correlation) rows.

    operators: {row: (shapes, types, inputs[, sequence, forward_thread])}; rows that are
    listed alone have no shapes.
    """
    recorded = (
        operators if isinstance(operators, dict) else dict.fromkeys(operators, ())
    )
    return with_tables(
        make_timeline(rows, **meta),
        operators=[(row, *values) for row, values in recorded.items()],
    )


def by_name(table, column, name="name"):
    """{name: value}, times in ns."""
    scale = 1e9 if column.endswith("_s") and "per" not in column else 1
    return {
        key: round(float(value) * scale, 6)
        for key, value in zip(table[name], table[column], strict=True)
    }


NESTED = lanes("""
    -1 cpu: outer 0+100, inner 10+40, cudaLaunchKernel 20+5 #1, cudaLaunchKernel 60+5 #2, cudaLaunchKernel 100+5 #3
    7 compute: a 200+30 #1
    7 memcpy: b 230+7 #2
    7 compute: c 240+5 #3
    7 comm: d 250+4 #9
""")


def test_a_kernel_belongs_to_the_innermost_operator_around_its_launch():
    table = ops.operators(traced(NESTED, [0, 1]))
    assert by_name(table, "self_device_s") == {"inner": 30, ops.OUTSIDE: 9, "outer": 7}
    assert by_name(table, "device_s") == {"inner": 30, ops.OUTSIDE: 9, "outer": 37}
    assert by_name(table, "host_s") == {"inner": 40, ops.OUTSIDE: 0, "outer": 100}
    assert by_name(table, "self_host_s") == {"inner": 40, ops.OUTSIDE: 0, "outer": 60}
    assert by_name(table, "kernels") == {"inner": 1, ops.OUTSIDE: 2, "outer": 2}
    assert table["share"].sum() == pytest.approx(1) and table["share"][
        0
    ] == pytest.approx(30 / 46)
    assert table["flops"].isna().all() and table.attrs["source"] == "measured"


def test_ranks_and_threads_do_not_mix():
    """The same times and correlations on another rank, where one launch is on another
    thread than the operators.
    """
    other = [(1, *row[1:]) for row in NESTED]
    other[2] = (1, -2, *other[2][2:])
    timeline = concat([traced(NESTED, [0, 1]), traced(other, [0, 1])])
    tables = dict(iter(ops.operators(timeline).groupby("rank")))
    assert by_name(tables[0], "self_device_s") == {
        "inner": 30,
        ops.OUTSIDE: 9,
        "outer": 7,
    }
    assert by_name(tables[1], "self_device_s") == {
        ops.OUTSIDE: 39,
        "outer": 7,
        "inner": 0,
    }


def test_a_graph_launch_starts_many_kernels():
    rows = lanes(
        "-1 cpu: replay 0+10, cudaGraphLaunch 2+3 #5\n7 compute: k0 20+4 #5, k1 30+4 "
        "#5, k2 40+4 #5"
    )
    table = ops.operators(traced(rows, [0]))
    assert by_name(table, "device_s") == {"replay": 12} and by_name(
        table, "kernels"
    ) == {"replay": 3}


def test_an_operator_inside_of_its_own_name_counts_its_time_once():
    host = (
        "-1 cpu: aten::norm 0+100, aten::norm 10+50, launch 20+5 #1, aten::norm 100+10"
    )
    table = ops.operators(traced(lanes(host + "\n7 compute: k 30+8 #1"), [0, 1, 3]))
    assert table["count"].tolist() == [3]
    assert by_name(table, "host_s") == {"aten::norm": 110} and by_name(
        table, "device_s"
    ) == {"aten::norm": 8}
    assert by_name(table, "self_host_s") == {"aten::norm": 110}


def test_flops_count_at_the_innermost_and_bytes_not_inside_of_them():
    """linear and addmm tell the same product; copy_ inside of addmm is part of it,
    relu_ passes all to clamp_min_.
    """
    linear = ("[[4,8],[2,8]]", '["float","float"]', "")
    addmm = ("[[2],[4,8],[8,2]]", '["float","float","float"]', "")
    eight = ("[[8],[8]]", '["float","float"]', "")
    rows = lanes("""
        -1 cpu: aten::linear 0+50, aten::addmm 10+30, aten::copy_ 11+5, launch 20+5 #1
        -1 cpu: aten::relu_ 60+10, aten::clamp_min_ 61+5, aten::mul 80+10, aten::copy_ 81+5
        -1 cpu: launch 62+1 #2, launch 82+1 #3, launch 88+1 #4
        7 compute: gemm 70+16 #1, clamp 90+1 #2, copy 92+1 #3, mul 94+1 #4
    """)
    one, scalars = ("[[8]]", '["float"]', ""), ("[[],[]]", '["float","double"]', "")
    shapes = {0: linear, 1: addmm, 2: eight, 4: one, 5: one, 6: eight, 7: scalars}
    table = ops.operators(traced(rows, shapes)).set_index("name")
    assert table["flops"].dropna().to_dict() == {"aten::addmm": 128}
    moved = {
        "aten::addmm": 4 * (2 + 32 + 16 + 8),
        "aten::clamp_min_": 64,
        "aten::mul": 96,
        "aten::copy_": 12,
    }
    assert table["moved_bytes"].dropna().to_dict() == moved
    rates = {
        "flops_per_s": 128 / 16e-9,
        "bytes_per_s": 232 / 16e-9,
        "flops_per_byte": 128 / 232,
    }
    assert table.loc["aten::addmm", list(rates)].to_dict() == pytest.approx(rates)


def test_rates_are_of_the_calls_that_count():
    rows = lanes(
        "-1 cpu: aten::mm 0+10, l 1+2 #1, aten::mm 10+10, l 11+2 #2\n7 compute: a "
        "30+4 #1, a 40+60 #2"
    )
    given = traced(rows, {0: MM, 2: ("", "", "")})
    table = ops.operators(given)
    assert (
        table["flops_per_s"].tolist() == [pytest.approx(128 / 4e-9)]
        and by_name(table, "device_s")["aten::mm"] == 64
    )
    shaped = ops.operators(given, by_shape=True)
    assert shaped[["shapes", "dtype", "count"]].to_numpy().tolist() == [
        ["", "", 1],
        [MM[0], "fp32", 1],
    ]


def test_kernels_tell_that_fp32_was_rounded_to_tf32():
    rows, names = (
        [],
        (
            "sm80_xmma_gemm_f32f32_tf32f32_f32_nn",
            "ampere_sgemm_128x64_nn",
            "a_tf32_kernel_on_halves",
        ),
    )
    for i, name in enumerate(names):
        rows += [
            (0, -1, "cpu", "aten::mm", 10 * i, 10, -1),
            (0, -1, "cpu", "l", 10 * i + 1, 2, i),
        ]
        rows += [(0, 7, "compute", name, 100 * i + 50, 4 + i, i)]
    halves = (MM[0], MM[1].replace("float", "c10::Half"), "")
    table = ops.operators(traced(rows, {0: MM, 3: MM, 6: halves}), by_shape=True)
    assert by_name(table, "device_s", "dtype") == {"tf32": 4, "fp32": 5, "fp16": 6}


def test_by_shape_an_operator_may_be_inside_of_its_own_name():
    """MTIA: aten::mm calls aten::mm with the output as a third input; both rows have
    the time, one has the FLOPs.
    """
    rows = lanes("-1 cpu: aten::mm 0+20, aten::mm 1+9, l 2+3 #1\n7 compute: fc 50+8 #1")
    inner = ("[[4,8],[8,2],[4,2]]", '["float","float","float"]', "")
    table = ops.operators(traced(rows, {0: MM, 1: inner}), by_shape=True)
    assert by_name(table, "device_s", "shapes") == {inner[0]: 8, MM[0]: 8}
    assert table["flops"].fillna(0).tolist() == [128, 0] and table[
        "moved_bytes"
    ].fillna(0).tolist() == [224, 0]


def test_without_a_device_the_time_is_the_hosts():
    rows = lanes(
        "-1 compute: aten::linear 0+50\n-1 cpu: aten::mm 10+32\n-2 comm: "
        "gloo:all_reduce 0+99"
    )
    table = ops.operators(
        traced(rows, {0: ("", "", ""), 1: MM, 2: ("[[8]]", '["float"]', "")})
    )
    assert by_name(table, "self_device_s") == {"aten::mm": 32, "aten::linear": 18}
    assert by_name(table, "device_s") == {"aten::mm": 32, "aten::linear": 50}
    assert (
        table["flops_per_s"].max() == pytest.approx(128 / 32e-9)
        and not table["kernels"].any()
    )


def test_a_simulation_shows_its_own_operators():
    rows = lanes("0 compute: mlp 0+5, mlp 5+6\n2 comm: all_reduce 5+4")
    timeline = make_timeline(rows, source="simulated", device="a100-80")
    table = ops.operators(timeline)
    assert by_name(table, "device_s") == {"mlp": 11, "all_reduce": 4} and table[
        "count"
    ].tolist() == [2, 1]
    assert table.attrs["source"] == "simulated"
    found = roofline.mfu(timeline, flops_per_step=11e-9 * 312e12 / 2)
    assert found[["rank", "step"]].to_numpy().tolist() == [[0, 0]] and found[
        "mfu"
    ].tolist() == [pytest.approx(0.5)]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("rows", [[], NESTED, [NESTED[0]], NESTED[5:]])
def test_missing_data_gives_no_rows_or_nan(function, rows):
    """Nothing at all, no operator table, no device, no host."""
    table = function(traced(rows))
    assert set(table.columns) == set(
        function(traced(NESTED, {0: MM, 1: MM}, device="a100-80")).columns
    )
    assert len(table) <= len(rows)
    if "flops" in table:
        assert table["flops"].isna().all()


def test_any_forest_of_spans():
    """Random nested operators against a search over all of them."""
    random = np.random.default_rng(0)
    rows, open_until = [], [400]
    for time in sorted(
        random.integers(0, 390, 80).tolist()
    ):  # each inside of what is still open
        open_until = [end for end in open_until if end > time]
        open_until.append(int(random.integers(time, open_until[-1] + 1)))
        rows.append((0, -1, "cpu", f"op{len(rows)}", time, open_until[-1] - time, -1))
    launches = random.integers(0, 400, 60)
    operators = list(range(len(rows)))
    rows += [(0, -1, "cpu", "launch", int(t), 0, i) for i, t in enumerate(launches)]
    rows += [(0, 7, "compute", "k", 500 + 10 * i, i + 1, i) for i in range(60)]
    expected, inclusive = {}, {}
    for i, time in enumerate(launches):
        inside = [r for r in rows[: len(operators)] if r[4] <= time < r[4] + r[5]]
        name = inside[-1][3] if inside else ops.OUTSIDE
        expected[name] = expected.get(name, 0) + i + 1
        for row in inside:
            inclusive[row[3]] = inclusive.get(row[3], 0) + i + 1
    table = ops.operators(traced(rows, operators))
    assert len(operators) > 40 and len(expected) > 10
    assert {k: v for k, v in by_name(table, "self_device_s").items() if v} == expected
    assert {
        k: v
        for k, v in by_name(table[table["name"] != ops.OUTSIDE], "device_s").items()
        if v
    } == inclusive


# Linear_1 is recomputed in the backward pass; the view has the number of mm and makes
# no node
MODULES = lanes("""
    -1 cpu: nn.Module: Net_0 0+100, nn.Module: Linear_0 14+16, aten::view 12+2, aten::mm 14+10, launch 15+2 #1
    -1 cpu: nn.Module: Linear_1 40+20, triton launch 45+2 #2, launch 80+2 #3
    -2 cpu: evaluate_function: MmBackward0 200+50, aten::mm 205+20, launch 210+2 #4
    -2 cpu: nn.Module: Linear_1 230+10, launch 232+2 #5
    7 compute: k 400+2 #1, k 500+4 #2, k 600+8 #3, k 700+16 #4, k 800+32 #5
""")
MODULE_OPS = {
    2: ("", "", "", 7, 0),
    3: (*MM, 7, 0),
    8: ("", "", "", 7, 1),
    9: (*MM, -1, -1),
}


def test_modules_own_their_kernels_forward_and_backward():
    table = ops.modules(traced(MODULES, MODULE_OPS)).set_index("module")
    times = {
        c: (table[c] * 1e9).round().astype(int).to_dict()
        for c in ("device_s", "self_device_s", "backward_s")
    }
    assert times["self_device_s"] == {
        "Linear_1": 4 + 32,
        "Linear_0": 2 + 16,
        "Net_0": 8,
    }
    assert times["device_s"] == {
        "Linear_1": 4 + 32,
        "Linear_0": 2 + 16,
        "Net_0": 2 + 4 + 8 + 16,
    }
    assert times["backward_s"] == {"Linear_1": 0, "Linear_0": 16, "Net_0": 16}
    assert table["flops"].to_dict() == {"Linear_1": 0, "Linear_0": 256, "Net_0": 256}
    assert table["count"].to_dict() == {"Linear_1": 2, "Linear_0": 1, "Net_0": 1}
    assert table["inside"].to_dict() == {
        "Linear_1": "Net_0",
        "Linear_0": "Net_0",
        "Net_0": "",
    }
    assert table["type"].tolist() == ["Linear", "Linear", "Net"] and table[
        "share"
    ].sum() == pytest.approx(1)


def test_modules_on_the_host():
    table = ops.modules(
        traced([row for row in MODULES if row[1] < 0], MODULE_OPS)
    ).set_index("module")
    assert (table["device_s"] * 1e9).round().to_dict() == {
        "Linear_0": 10 + 50,
        "Net_0": 2 + 10 + 50,
        "Linear_1": 0,
    }


@pytest.mark.parametrize(
    ("flops", "moved", "bound"),
    [(312e6, 203.9e3, "compute"), (312e6, 20.39e6, "memory")],
)
def test_half_way_to_the_roof(flops, moved, bound, monkeypatch):
    """A product that takes twice as long as an A100 needs for its FLOPs (1 us) or its
    bytes (10 us).
    """
    costs = pd.DataFrame({"flops": [flops], "moved_bytes": [moved], "dtype": ["fp16"]})
    monkeypatch.setattr(ops, "operator_costs", lambda _: costs)
    rows = lanes(
        "-1 cpu: aten::mm 0+10, l 1+2 #1\n7 compute: a "
        f"30+{2000 if bound == 'compute' else 20_000} #1"
    )
    row = roofline.roofline(traced(rows, [0], device="NVIDIA A100-SXM4-80GB")).iloc[0]
    expected = {
        "roof": 0.5,
        "flops_per_byte": flops / moved,
        "peak_flops": 312e12,
        "peak_bytes_per_s": 2039e9,
    }
    assert row["bound"] == bound and row[list(expected)].to_dict() == pytest.approx(
        expected
    )


def test_what_multiplies_nothing_has_no_intensity():
    shapes = {0: ("[[1000],[1000]]", '["float","float"]', "")}
    rows = lanes("-1 cpu: aten::copy_ 0+10, l 1+2 #1\n7 compute: a 30+8 #1")
    table = roofline.roofline(traced(rows, shapes), device="t4")
    assert table[["flops_per_byte", "bound"]].to_numpy().tolist() == [[0, "memory"]]
    assert (
        table["roof"][0] == pytest.approx(8000 / 8e-9 / 320e9)
        and table.attrs["device"] == "t4"
    )


DEVICE_NAMES = {"NVIDIA H100 80GB HBM3": "h100-80", "Tesla V100-SXM2-32GB": "v100-32", "a100-80": "a100-80",
                "NVIDIA A100-PG509-200": "a100-40", "AMD Instinct MI300X": "mi300x", "NVIDIA H800": "h800",
                "NVIDIA GB200": "gb200", "NVIDIA GeForce RTX 3090": "rtx-3090", "Tesla T4": "t4",
                "NVIDIA B300 SXM6 AC": "b300", "Tesla P100-PCIE-16GB": "p100"}  # fmt: skip


@pytest.mark.parametrize(("device", "name"), DEVICE_NAMES.items())
def test_devices_by_the_name_in_a_trace(device, name):
    assert roofline._device_of(make_timeline([], device=device)).name == name


MULTIPLIED = [(*row[:3], "aten::mm", *row[4:]) for row in NESTED], {0: MM, 1: MM}


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("", "the timeline names no device"),
        ("Quadro X", "'Quadro X', the timeline's device, is not in the catalog"),
    ],
)
def test_unknown_devices_have_no_roofs(device, message):
    timeline = traced(*MULTIPLIED, device=device)
    for function, share in ((roofline.roofline, "roof"), (roofline.mfu, "mfu")):
        with pytest.warns(
            TraceWarning, match=f"{message}: its peaks are unknown; give device="
        ):
            table = function(timeline)
        assert (table["flops_per_s"] > 0).all() and table[share].isna().all()
        assert function(timeline, device=catalog.device("a100-80"))[share].notna().all()
        with pytest.raises(ValueError, match="unknown device 'h1000'"):
            function(timeline, "h1000")


def test_a_real_prefill_is_covered():
    timeline = read_trace(
        local_or_skip("traces/more/tracelens/sglang_prefilldecode.json.gz")
    )
    assert roofline.mfu(timeline)["coverage"].item() > 0.9


def test_the_host_has_not_the_peaks_of_the_device():
    timeline = traced(lanes("-1 compute: aten::mm 0+10"), {0: MM}, device="v100-32")
    for function, share in ((roofline.roofline, "roof"), (roofline.mfu, "mfu")):
        with pytest.warns(TraceWarning, match="only the host is at work"):
            assert function(timeline)[share].isna().all()


def test_flops_count_where_kernels_ran():
    """Of two products one launches a kernel (the other is captured in a graph); a
    kernel of 30 ns has no operator.
    """
    rows = """
        -1 cpu: aten::mm 0+10, cudaLaunchKernel 2+2 #1, aten::mm 20+10, run 40+20, cudaLaunchKernel 45+2 #2
        7 compute: sgemm 100+{} #1, cutlass_gemm 200+30 #2, elementwise_kernel 300+500 #9
    """
    for first_ns, coverage in ((90, 0.75), (10, 0.25)):
        shapes = {0: MM, 2: MM, 3: ("[]", "[]", "")}
        timeline = traced(lanes(rows.format(first_ns)), shapes, device="v100-32")
        (row,) = roofline.mfu(timeline).itertuples()
        assert (row.flops, row.coverage) == (128, pytest.approx(coverage))
        assert np.isnan(row.mfu) == (coverage < 0.5)
        assert roofline.mfu(timeline, flops_per_step=512)["mfu"][0] > 0
    assert by_name(ops.operators(timeline), "flops")["aten::mm"] == 128


def test_what_was_not_recorded_is_said():
    timeline = traced(
        lanes("-1 cpu: aten::mm 0+10, launch 2+2 #1\n7 compute: sgemm 10+90 #1"), [0]
    )
    with pytest.warns(TraceWarning, match="profile with record_shapes=True"):
        assert roofline.mfu(timeline)["mfu"].isna().all()


def test_a_simulated_step_says_where_its_mfu_is():
    step = simulate("gpt2", "dgx-a100", "dp8", global_batch=8)
    with pytest.warns(
        TraceWarning, match="are unknown: mm.estimate gives the MFU of a simulated step"
    ):
        assert roofline.mfu(step)["mfu"].isna().all()


def test_mfu_goes_from_step_to_step():
    """Two products of 128 FLOP in step 0, one in step 1; steps start 50 ns apart, the
    last lasts 20 ns.
    """
    rows, shapes = [], {}
    for i, start in enumerate((0, 10, 60)):
        shapes[len(rows)] = MM
        rows += [
            (0, -1, "cpu", "aten::mm", start, 10, -1),
            (0, -1, "cpu", "l", start, 1, i),
        ]
        rows += [(0, 7, "compute", "k", start + 100 - 10 * (i == 2), 20, i)]
    timeline = with_columns(
        traced(rows, shapes, device="v100-32"), step=[0] * 6 + [1] * 3
    )
    table = roofline.mfu(timeline)
    assert table["flops"].tolist() == [256, 128]
    assert (table["total_s"] * 1e9).round(6).tolist() == [50, 20]
    assert table["mfu"].tolist() == pytest.approx(
        [256 / 50e-9 / 15.7e12, 128 / 20e-9 / 15.7e12]
    )
    given = roofline.mfu(timeline, flops_per_step=512)
    assert given["mfu"].tolist() == pytest.approx(
        [512 / 50e-9 / 15.7e12, 512 / 20e-9 / 15.7e12]
    )


def test_kernel_statistics():
    table = ops.kernels(make_timeline(lanes("7 compute: a 0+2, a 5+4\n9 comm: b 0+3")))
    assert table[["kind", "name", "count"]].to_numpy().tolist() == [
        ["compute", "a", 2],
        ["comm", "b", 1],
    ]
    statistics = table[["total_s", "mean_s", "min_s", "max_s"]].iloc[0] * 1e9
    assert statistics.round(6).tolist() == [6, 3, 2, 4] and table[
        "share"
    ].tolist() == pytest.approx([2 / 3, 1 / 3])
    assert table["std_s"][0] == pytest.approx(2**0.5 * 1e-9)


def test_kinds_side_by_side():
    timeline = make_timeline(
        lanes("7 compute: a 0+10\n9 comm: b 5+20\n8 memcpy: c 8+4, c 30+1")
    )
    table = ops.kernel_types(timeline)
    expected = {
        "compute": 5,
        "comm": 13,
        "compute + comm": 3,
        "memcpy": 1,
        "comm + memcpy": 2,
    }
    expected["compute + comm + memcpy"] = 2
    assert by_name(table, "total_s", "kinds") == expected and table[
        "share"
    ].sum() == pytest.approx(1)
    two = ops.kernel_types(timeline, ("compute", "comm"))
    assert by_name(two, "total_s", "kinds") == {
        "compute": 5,
        "comm": 15,
        "compute + comm": 5,
    }


HTA_SETS = ["nccl_data", "df_index_resolver", "rank0"]
HTA_KINDS = {"COMPUTATION": "compute", "COMMUNICATION": "comm", "MEMORY": "memcpy"}


@pytest.fixture(scope="module", params=HTA_SETS)
def beside_hta(request):
    """HTA's analysis, and our reading by its rules."""
    path = local_or_skip(f"traces/hta-samples/{request.param}.json.gz")
    return hta.analysis(path), read_trace(path, hta_compatible=True)


def test_kernel_types_are_those_of_hta(beside_hta):
    analysis, timeline = beside_hta
    for kinds in (("compute", "comm"), ("compute", "comm", "memcpy")):
        theirs, _ = analysis.get_gpu_kernel_breakdown(
            visualize=False, include_memory_kernels=len(kinds) == 3
        )
        theirs = theirs[theirs["sum"] > 0]
        names = (
            theirs["kernel_type"]
            .str.split(" overlapping ")
            .map(lambda both: " + ".join(map(HTA_KINDS.get, both)))
        )
        ours = ops.kernel_types(timeline, kinds)
        assert by_name(ours, "total_s", "kinds") == dict(
            zip(names, theirs["sum"] * 1000, strict=True)
        )
        assert sorted((ours["share"] * 100).round(1)) == sorted(theirs["percentage"])


def test_kernel_statistics_are_those_of_hta(beside_hta):
    """Of as many kernels as there are. By default HTA 0.5.0 lumps all but ten and then
    gives sums for max and min.
    """
    analysis, timeline = beside_hta
    ours = (
        ops.kernels(timeline)
        .assign(name=lambda t: t["name"].astype(str))
        .set_index(["kind", "name"])
    )
    everything = {
        "include_memory_kernels": True,
        "num_kernels": 10_000,
        "duration_ratio": 1.0,
    }
    _, theirs = analysis.get_gpu_kernel_breakdown(visualize=False, **everything)
    theirs.index = pd.MultiIndex.from_arrays(
        [theirs["kernel_type"].map(HTA_KINDS), theirs["name"]]
    )
    assert sorted(theirs.index) == sorted(ours.index)
    names = {
        "sum (us)": "total_s",
        "max (us)": "max_s",
        "min (us)": "min_s",
        "mean (us)": "mean_s",
        "stddev": "std_s",
    }
    for column, name in names.items():
        values = theirs[column].astype(float).reindex(ours.index).to_numpy()
        assert (ours[name] * 1e6).fillna(0).to_numpy() == pytest.approx(
            values, rel=1e-9
        ), name
    _, default = analysis.get_gpu_kernel_breakdown(visualize=False)
    default = default[
        (default["kernel_type"] == "COMPUTATION") & (default["name"] != "others")
    ].set_index("name")
    longest_s = ours.loc["compute", "max_s"].reindex(default.index)
    assert (default["max (us)"] == default["sum (us)"]).all() and (
        longest_s * 1e6 < default["max (us)"]
    ).any()


@pytest.fixture(scope="module")
def owlv2():
    return read_trace(local_or_skip("traces/tracelens-samples/owlv2_h100.json.gz"))


def test_a_real_inference_stays_under_the_peaks(owlv2):
    table, device = ops.operators(owlv2), catalog.device("h100-80")
    busy = owlv2.spans[owlv2.spans["kind"].isin(BUSY_KINDS)]
    assert (
        table["self_device_s"].sum() * 1e9 == pytest.approx(busy["dur_ns"].sum())
        and table["kernels"].max() > 1000
    )
    assert ops.OUTSIDE not in set(table["name"]) and table[
        "share"
    ].sum() == pytest.approx(1)
    assert 0.5 < table["flops_per_s"].max() / device.peak("bf16") < 0.76
    roofs = roofline.roofline(owlv2)
    assert (
        roofs["roof"].max() < 1.01
        and roofline.mfu(owlv2)["mfu"].between(0.027, 0.028).all()
    )


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
    spans, (calls, work) = timeline.spans, ops.operator_calls(timeline)
    work = work[work["launch_row"] >= 0]
    theirs = spans["op"].to_numpy()[work["row"]]
    ours = spans["op"].to_numpy()[calls["row"].to_numpy()[work["call"]]]
    assert (
        len(work) > 2000
        and (work["stream"] == 0).sum() > 2000
        and (ours == theirs).all()
    )


def test_backward_kernels_of_a_real_training_belong_to_modules():
    timeline = read_trace(
        local_or_skip("traces/tracelens-samples/train_resnet18.json.gz")
    )
    table = ops.modules(timeline).set_index("module")
    assert table.loc["ResNet_0", "backward_s"] / table.loc[
        "ResNet_0", "device_s"
    ] == pytest.approx(0.68, abs=0.05)
    assert table.loc["Conv2d_19", "flops"] == pytest.approx(
        3 * 5 * 2 * 512 * 49 * 512 * 512 * 9
    )
