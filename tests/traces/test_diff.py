from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings, strategies as st
from support import (
    lanes,
    local_or_skip,
    make_timeline,
    refused_line,
    shows,
    with_columns,
)

import madmax_lib as mm
from madmax_lib.catalog.datasets import PROJECT
from madmax_lib.catalog.models import Cluster, Device, Link, Transformer
from madmax_lib.timeline.accounting import breakdown
from madmax_lib.timeline.timeline import BUSY_KINDS, Timeline
from madmax_lib.traces import hta
from madmax_lib.traces.diff import (
    align_ranks,
    align_steps,
    compare,
    compare_ops,
    op_classes,
    op_names,
)
from madmax_lib.traces.read.kineto import read_trace

NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"
STEP = f"7 compute: gemm 0+10, gelu 20+4\n20 comm: {NCCL} 8+6"


def in_steps(drawn, steps, **meta):
    """The lanes once in each step, 100 ns apart."""
    spans = make_timeline(lanes(drawn)).spans
    parts = [
        spans.assign(step=step, start_ns=spans["start_ns"] + 100 * i)
        for i, step in enumerate(steps)
    ]
    whole = pd.concat([spans[:0], *parts], ignore_index=True)
    return Timeline(whole, make_timeline([], **meta).meta)


def once(drawn, **meta):
    return make_timeline(lanes(drawn), **meta)


def on_ranks(drawn, ranks) -> str:
    return "\n".join(
        drawn.replace("7 ", f"{r}/7 ").replace("20 comm", f"{r}/20 comm") for r in ranks
    )


def values(table, column, key="quantity"):
    return table.set_index(key)[column]


def test_identical_timelines_do_not_differ():
    a = in_steps(STEP, [3, 4])
    table, ops = compare(a, a), compare_ops(a, a)
    assert (table["difference"] == 0).all() and set(table["ratio"].dropna()) == {1.0}
    assert (ops["difference_s"] == 0).all()
    assert set(zip(ops["status"], ops["matched"], strict=True)) == {("both", "name")}


def test_compare_of_one_step_is_the_difference_of_the_breakdowns():
    """b: the first kernel takes 15 instead of 10 ns, so 6 of the 6 ns of communication
    are hidden instead of 2.
    """
    a, b = once(STEP), once(STEP.replace("gemm 0+10", "gemm 0+15"))
    table = compare(a, b).set_index("quantity")
    for side, timeline in (("a", a), ("b", b)):
        expected = breakdown(timeline).iloc[0].drop("rank").to_dict()
        assert table[side].to_dict() == pytest.approx(expected, rel=1e-12)
        assert table[f"{side}_min"].tolist() == table[f"{side}_max"].tolist()
    assert table.loc["compute_s", "difference"] == pytest.approx(5e-9)
    assert table.loc["compute_s", "ratio"] == pytest.approx(19 / 14)
    exposed_s, overlap = table.loc[["exposed_comm_s", "overlap"], "b"]
    assert (exposed_s, overlap) == pytest.approx((0, 1))
    assert np.isnan(table.loc["memory_s", "ratio"])


def test_a_slowed_kind_gives_its_ratio():
    slow = once(f"7 compute: gemm 0+10, gelu 60+4\n20 comm: {NCCL} 24+18")
    ratios = values(compare(once(STEP), slow), "ratio")[["compute_s", "comm_s"]]
    assert ratios.tolist() == pytest.approx([1, 3])
    ops = compare_ops(once(STEP), slow).sort_values("name")
    shows(ops, f"name  difference_s ns\ngelu  0\ngemm  0\n{NCCL}  12")


def test_status_of_operations():
    a = once("7 compute: x 0+5, gone 10+5, more 20+5, less 30+5, less 40+5")
    b = once("7 compute: x 0+5, new 10+5, more 20+5, more 30+5, less 40+5")
    expected = """
        name  status   matched  count_a  count_b  difference_s ns
        gone  missing  -        1        0        -5
        less  fewer    name     2        1        -5
        more  more     name     1        2        5
        new   extra    -        0        1        5
        x     both     name     1        1        0
    """
    shows(compare_ops(a, b).sort_values("name"), expected)


def test_means_are_per_rank_and_step():
    """Two ranks and two steps beside one rank and one step of the same work: nothing
    differs.
    """
    a = in_steps(on_ranks(STEP, [0, 1]), [5, 6])
    b = in_steps(STEP, [5], represents={0: [0, 1]})
    assert compare(a, b)["difference"].tolist() == pytest.approx([0] * 8, abs=1e-18)
    assert compare_ops(a, b)[["count_a", "count_b"]].to_numpy().tolist() == [[1, 1]] * 3


def test_spread_is_over_ranks_and_steps_and_overlap_is_of_the_means():
    """Compute of 10, 20 ns in the steps of rank 0, 30, 40 of rank 1; 4 ns of
    communication beside the first only.
    """
    drawn = f"""
        0/7 compute: k 0+10, k 1000+20
        1/7 compute: k 0+30, k 1000+40
        0/8 comm: {NCCL} 0+4, {NCCL} 1100+4
        1/8 comm: {NCCL} 100+4, {NCCL} 1100+4
    """
    t = with_columns(once(drawn, represents={0: [0], 1: [1]}), step=[0, 1] * 4)
    table = compare(t, t).set_index("quantity")[["a", "a_min", "a_max"]]
    assert (table.loc["compute_s"] * 1e9).tolist() == pytest.approx([25, 10, 40])
    assert table.loc["overlap"].tolist() == pytest.approx([1 / 4, 0, 1])


KERNELS = st.sampled_from(["k1", "k2", "add<4>", "add<8>"])
SPANS = st.lists(
    st.tuples(st.sampled_from(BUSY_KINDS), KERNELS, st.integers(0, 20)), max_size=12
)
BY = st.sampled_from([None, "name", "op", "class"])


@settings(max_examples=30, deadline=None)
@given(SPANS, SPANS, BY, st.sampled_from(["measured", "simulated"]))
def test_differences_of_operations_add_up_by_kind(first, second, by, source):
    """Whatever is matched: each span counts once on its side, and only with its kind."""
    a, b = (
        make_timeline(
            [(0, 7, *span[:2], 30 * i, span[2]) for i, span in enumerate(spans)],
            source=s,
        )
        for spans, s in ((first, "measured"), (second, source))
    )
    ops = compare_ops(a, b, by=by)
    counts = ops[["count_a", "count_b"]].sum().tolist()
    assert counts == pytest.approx([len(first), len(second)])
    for kind in BUSY_KINDS:
        ns_a, ns_b = (
            sum(dur for k, _, dur in spans if k == kind) for spans in (first, second)
        )
        sums_s = ops.loc[ops["kind"] == kind, ["difference_s", "total_a_s"]].sum()
        expected_s = [(ns_b - ns_a) * 1e-9, ns_a * 1e-9]
        assert sums_s.tolist() == pytest.approx(expected_s, abs=1e-18)


def test_names_without_partner_are_matched_by_op():
    """The same kernel in another tile or template; an exact partner is preferred."""
    same = "7 compute: volta_sgemm_128x64_nn 0+5, "
    a = once(f"{same}volta_sgemm_32x32_nn 5+2")
    b = once(f"{same}ampere_sgemm_64x64_nn 5+1")
    expected = """
        name                  matched  difference_s ns
        sgemm_nn              op       -1
        volta_sgemm_128x64_nn  name    0
    """
    shows(compare_ops(a, b).sort_values("name"), expected)
    assert set(compare_ops(a, b, by="name")["status"]) == {"both", "missing", "extra"}
    shows(compare_ops(a, b, by="class"), "name  count_a\ngemm  2")


STEPS = [
    ([3, 4], [3, 4], [[3, 3], [4, 4]]),
    ([3, 4, 5], [4, 5, 6], [[4, 4], [5, 5]]),
    ([1, 2, 3], [1, 2, 3], [[1, 1], [2, 2], [3, 3]]),
    ([1, 2], [11, 12, 13], [[1, 11], [2, 12]]),  # no common number: in order
    ([7], [4, 5], [[7, 4], [7, 5]]),  # a lone step of another number stands for all
    ([-1], [7], [[-1, 7]]),
    ([1], [], []),
]


@pytest.mark.parametrize(("steps_a", "steps_b", "expected"), STEPS)
def test_align_steps_of_measured_timelines(steps_a, steps_b, expected):
    a, b = (in_steps(STEP, steps) for steps in (steps_a, steps_b))
    assert align_steps(a, b).to_numpy().tolist() == expected


def test_a_simulated_step_stands_for_every_step():
    measured, simulated = in_steps(STEP, [10, 11, 12]), once(STEP, source="simulated")
    pairs = [[10, 0], [11, 0], [12, 0]]
    assert align_steps(measured, simulated).to_numpy().tolist() == pairs
    # a first step that is slower is warm-up, as everywhere
    spans = measured.spans
    slower = spans["dur_ns"].where((spans["step"] > 10) | (spans["stream"] < 20), 20)
    measured = replace(measured, spans=spans.assign(dur_ns=slower))
    assert align_steps(simulated, measured).to_numpy().tolist() == [[0, 11], [0, 12]]
    two = in_steps(STEP, [0, 1, 2], source="simulated")
    assert align_steps(two, two).to_numpy().tolist() == [[0, 0], [1, 1], [2, 2]]


def test_steps_without_device_work_are_no_steps():
    spans = in_steps(STEP, [1, 2]).spans
    idle = once("-1 cpu: aten::mm 900+5").spans.assign(step=3)
    a = Timeline(pd.concat([spans, idle], ignore_index=True))
    assert align_steps(a, a)["step_a"].tolist() == [1, 2]


def test_align_ranks_by_what_they_stand_for():
    measured = once(on_ranks(STEP, range(4)))
    stages = once(on_ranks(STEP, (0, 2)), represents={0: [0, 1], 2: [2, 3]})
    same = align_ranks(measured, measured)[["rank_a", "rank_b"]]
    assert same.to_numpy().tolist() == [[rank, rank] for rank in range(4)]
    pairs = [[0, 0, 0], [1, 1, 0], [2, 2, 2], [3, 3, 2]]
    assert align_ranks(measured, stages).to_numpy().tolist() == pairs


def test_ranks_weigh_as_many_devices_as_they_stand_for():
    """Stage 0 computes 10 ns on three devices, stage 3 computes 30 ns on one: 15 ns on
    average.
    """
    drawn = "0/0 compute: k 0+10\n3/0 compute: k 0+30"
    stages = once(drawn, represents={0: [0, 1, 2], 3: [3]}, source="simulated")
    # shares no device: a mean on each side
    other = once("9/0 compute: k 0+15")
    assert not len(align_ranks(stages, other))
    for b in (stages, other):
        row = compare(stages, b).set_index("quantity").loc["compute_s"]
        ns = [row["a"] * 1e9, row["difference"] * 1e9]
        assert ns == pytest.approx([15, 0], abs=1e-9)
        total_s = values(compare_ops(stages, b), "total_a_s", "name").iloc[0]
        assert total_s == pytest.approx(15e-9)


def test_nothing_to_compare_gives_nan_and_missing():
    a, empty = once(STEP), make_timeline([])
    table = compare(a, empty)
    assert table[["b", "difference"]].isna().all(axis=None)
    assert values(table, "a")["compute_s"] == pytest.approx(14e-9)
    assert set(compare_ops(a, empty)["status"]) == {"missing"}
    assert set(compare_ops(empty, a)["status"]) == {"extra"}
    nothing = compare_ops(empty, empty)
    assert not len(nothing) and list(nothing) == list(compare_ops(a, a))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"by": "shape"}, "by='shape'"), ({"kinds": ["gpu"]}, "'gpu'")],
)
def test_bad_arguments(arguments, words):
    with refused_line(words):
        compare_ops(once(STEP), once(STEP), **arguments)


def test_both_origins_are_kept():
    a = once(STEP, provenance={"files": {"0": "sha a"}})
    told = {"model": "gpt", "plan": "dp2"}
    b = once(STEP, source="simulated", provenance=told)
    labels = ("a (measured)", "b (simulated)")
    files = dict(zip(labels, ({"0": "sha a"}, {"simulated": told}), strict=True))
    for table in (compare(a, b), compare_ops(a, b)):
        assert table.attrs["sources"] == ("measured", "simulated")
        assert table.attrs["source"] == "simulated"
        assert table.attrs["labels"] == labels
        assert table.attrs["provenance"]["files"] == files
    assert compare(a, b, labels=("x", "y")).attrs["labels"] == ("x", "y")
    assert mm.compare is compare


OPS = [
    ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float> >(int)",
     "elementwise CUDAFunctor_add", "pointwise"),
    ("void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl<at::native::BinaryFunctor<float, float, "
     "float, at::native::binary_internal::MulFunctor<float> > > >(int)", "elementwise MulFunctor", "pointwise"),
    ("void at::native::elementwise_kernel<128, 2, at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>(int)",
     "elementwise direct_copy_kernel_cuda", "copy"),
    ("volta_sgemm_128x64_tn", "sgemm_tn", "gemm"),
    ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas", "xmma_gemm_bfbf_bff_f_tn_n_tilesize_cublas",
     "gemm"),
    ("void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_64x64_16x6_nt_align4>(Params)",
     "cutlass_tensorop_sgemm_nt_align", "gemm"),
    ("Cijk_Ailk_Bljk_BBS_BH_MT320x224x64_MI16x16x1_SN", "Cijk_Ailk_Bljk_BBS_BH", "gemm"),
    ("sm80_xmma_wgrad_implicit_gemm_indexed_nhwc", "xmma_wgrad_implicit_gemm_indexed_nhwc", "convolution"),
    ("void flash_bwd_kernel<Flash_bwd_kernel_traits<64> >(Params)", "flash_bwd_kernel", "attention"),
    ("triton_poi_fused_addmm_gelu_view_15", "triton_poi_fused_addmm_gelu_view", "fused"),
    ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<float> >(int)",
     "multi_tensor_apply_kernel FusedAdamMathFunctor", "optimizer"),
    ("autograd::engine::evaluate_function: MmBackward0", "evaluate_function: MmBackward", "gemm"),
    ("autograd::engine::evaluate_function: TBackward0", "evaluate_function: TBackward", "shape"),
    ("aten::_fused_adamw_", "fused_adamw", "optimizer"),
    ("c10d::_allgather_base_", "allgather_base", "collective call"),
    ("Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD", "copy"),
    (NCCL, "all_reduce", "all_reduce"),
    ("gloo:all_gather", "all_gather", "all_gather"),
    ("attention 11 backward", "attention backward", "layer"),
    ("embedding forward", "embedding forward", "embedding"),
    ("adam", "adam", "optimizer"),
    ("reduce_scatter gradients head", "reduce_scatter", "reduce_scatter"),
    ("42", "42", "other"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "op", "work"), OPS)
def test_ops_and_classes(name, op, work):
    assert [op_names([name])[0], op_classes([name])[0]] == [op, work]


# Measured against simulated


@pytest.fixture(scope="module")
def gpt():
    """The GPT of traces/record.py, and its step on two imagined devices."""
    sizes = {"layers": 4, "hidden": 128, "heads": 4, "ffn": 512, "sequence": 64}
    model = Transformer("gpt", **sizes, vocab=512, tied=False)
    assert model.parameters == 932_608  # as traces/README.md says
    device, link = Device("device", 1e10, 4e10, {"fp32": 6e10}), Link("link", 1e9)
    plan = mm.Plan(dp=2, micro_batch=8, bucket_bytes=0.8 * 2**20)
    cluster = Cluster("two", device, 2, 1, link, link)
    return mm.simulate(model, cluster, plan, global_batch=16, dtype="fp32")


def test_a_measured_step_beside_a_simulated_one(gpt):
    measured = read_trace(mm.dataset("gpt-ddp"))
    ops = compare_ops(measured, gpt).set_index("name")
    # buckets close with layers
    assert ops.at["all_reduce", "count_a"] == 4 >= ops.at["all_reduce", "count_b"] > 1
    assert set(ops.loc[["layer", "optimizer", "embedding"], "matched"]) == {"class"}
    # what a simulation leaves out; nothing is invented
    assert ops["status"].isin(["both", "fewer", "missing"]).all()
    assert set(ops.loc[ops["status"] == "missing", "class"]) == {"gradient"}
    for side, timeline in (("a", measured), ("b", gpt)):
        busy = timeline.spans[timeline.spans["kind"].isin(BUSY_KINDS)]
        busy = busy[busy["step"] >= 0]
        mean_ns = busy["dur_ns"].sum() / len(busy[["rank", "step"]].drop_duplicates())
        total_ns = ops[f"total_{side}_s"].sum() * 1e9
        assert total_ns == pytest.approx(mean_ns, rel=1e-12)


def test_rates_of_one_model_predict_the_step_of_another():
    """What the notebook says: under DDP the prediction holds, with the rates as they
    were measured.
    """
    table = pd.read_csv(PROJECT / "figures" / "diff" / "simulated_kinds.csv")
    ratios = values(table, "ratio")[["total_s", "compute_s"]]
    assert ratios.tolist() == pytest.approx([1, 1], abs=0.1)


def test_an_all_to_all_is_matched_with_the_kernel_that_carries_it():
    a = once("7 comm: ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t 0+9")
    b = once("2 comm: all_to_all embedding forward 0+4", source="simulated")
    expected = """
        name       matched  status  difference_s ns
        send_recv  class    both    -5
    """
    shows(compare_ops(a, b), expected)


def test_an_exported_step_does_not_differ_from_itself(gpt, tmp_path):
    again = read_trace(mm.export_trace(gpt, tmp_path))
    assert again.meta.source == "simulated"
    ops = compare_ops(gpt, again)
    assert set(ops["matched"]) == {"name"} and ops["difference_s"].abs().max() == 0
    assert compare(gpt, again)["difference"].fillna(0).abs().max() == 0


# Beside HTA


def labeled(path, rank, label):
    """HTA's trace of one file."""
    with hta._quiet():
        from hta.common.trace import Trace
        from hta.trace_diff import LabeledTrace

        trace = Trace(trace_files={rank: str(path)}, trace_dir="/")
        return LabeledTrace(label, t=trace)


COUNTS, TIMES = ["count_a", "count_b"], ["total_a_s", "total_b_s", "difference_s"]


def theirs(control, test, iterations, device):
    """(table, ops by status) of HTA, the table with our columns."""
    from hta.trace_diff import DeviceType, TraceDiff

    arguments = dict(
        zip(("control_iteration", "test_iteration"), iterations, strict=True)
    )
    arguments |= {"device_type": DeviceType[device]}
    with hta._quiet():
        table = TraceDiff.compare_traces(control, test, **arguments)
        ops = TraceDiff.ops_diff(control, test, **arguments)
    sides = [COUNTS[0], TIMES[0], COUNTS[1], TIMES[1]]
    table.columns = [*sides, "diff_counts", TIMES[2], "change"]
    return table.assign(**{c: table[c] * 1e-6 for c in TIMES}), ops


STATUS = {"added": "extra", "deleted": "missing", "unchanged": "both"}
STATUS |= {"increased": "more", "decreased": "fewer"}
KINDS = {"GPU": BUSY_KINDS, "CPU": ("cpu", "annotation")}
KINDS["ALL"] = (*BUSY_KINDS, "cpu", "annotation")


def assert_as_hta(ours, table, ops):
    sums = ours.groupby("name")[COUNTS + TIMES].sum()
    assert sorted(sums.index) == sorted(table.index)
    expected = table.loc[sums.index, list(sums)]
    np.testing.assert_allclose(sums, expected, rtol=1e-12, atol=1e-12)
    status = {STATUS[change]: set(names) for change, names in ops.items() if names}
    assert {name: set(part["name"]) for name, part in ours.groupby("status")} == status


@pytest.fixture(scope="module")
def two_v100():
    path = local_or_skip("traces/hta-samples/df_index_resolver.json.gz")
    pytest.importorskip("hta")
    return read_trace(path), labeled(path, 1, "control")


@pytest.mark.parametrize("device", KINDS)
@pytest.mark.parametrize("steps", [(3, 4), (2, 5), (5, 6)])
def test_two_steps_equal_hta(two_v100, device, steps):
    timeline, control = two_v100
    other = object.__new__(type(control))  # HTA wants two labels
    other.__dict__.update(vars(control), label="test")
    a, b = (timeline.select(steps=[step]) for step in steps)
    ours = compare_ops(a, b, by="name", kinds=KINDS[device])
    assert_as_hta(ours, *theirs(control, other, steps, device))


@pytest.mark.parametrize("device", KINDS)
def test_two_ranks_equal_hta(device):
    folder = local_or_skip("traces/param-dlrm-8xV100")
    pytest.importorskip("hta")
    files = sorted(folder.glob("*.json.gz"))
    ranks = [read_trace(files[rank]) for rank in (0, 7)]
    traces = [
        labeled(files[rank], rank, label)
        for rank, label in ((0, "control"), (7, "test"))
    ]
    ours = compare_ops(*ranks, by="name", kinds=KINDS[device])
    assert_as_hta(ours, *theirs(*traces, (10, 10), device))
