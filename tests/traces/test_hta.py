"""Our numbers beside those HTA prints live, on every GPU trace that is present."""

import numpy as np
import pytest
from support import dataset_or_skip, local_or_skip

from madmax_lib.accounting import breakdown
from madmax_lib.traces import hta
from madmax_lib.traces.read.kineto import TraceWarning, read_trace

GPU_TRACES = [
    "deepseek-v3-train/train.json.gz",
    "hta-samples/cuda_event_sync_multi_stream.json.gz",
    "hta-samples/df_index_resolver.json.gz",
    "hta-samples/gpu_user_annotation_gp100.json.gz",
    "hta-samples/mi250_minitoy_train_ROCm6_2_kineto.json.gz",
    "hta-samples/nccl_data.json.gz",
    "hta-samples/rank-0.Apr_03_18_51_38.1102.pt.trace.json.gz",
    "hta-samples/rank0.json.gz",
    "hta-mtia-87MB/mtia_rank_0.json.gz",
    "param-dlrm-8xV100",
    "tracelens-samples/owlv2_h100.json.gz",
    "tracelens-samples/profile_trace_rank_0.json.gz",
    "tracelens-samples/resnet_act_checkpoint.json.gz",
    "tracelens-samples/train_resnet18.json.gz",
]


@pytest.mark.filterwarnings("ignore:.*taken as rank 0:UserWarning")
@pytest.mark.parametrize("name", GPU_TRACES)
def test_compatible_breakdown_equals_hta(name):
    path = local_or_skip(f"traces/{name}")
    table = hta.beside_hta(path)
    times = table[table["quantity"] != "overlap"]
    assert len(times) >= 4
    assert times["error"].abs().max() <= 1e-6
    overlap = table[table["quantity"] == "overlap"]
    assert (overlap["compatible"].isna() == overlap["hta"].isna()).all()
    assert overlap["error"].abs().fillna(0).max() <= 1e-4


@pytest.fixture(scope="module")
def dlrm():
    path = dataset_or_skip("dlrm-8xv100")
    return hta.analysis(path), read_trace(path)


def test_kernels_have_our_totals(dlrm):
    theirs = hta.kernels(dlrm[0])
    theirs = theirs[theirs["name"] != "others"]  # HTA's sum of the short ones
    ours = dlrm[1].spans
    assert len(theirs) > 8
    for row in theirs.itertuples():
        ns = ours.loc[(ours["rank"] == row.rank) & (ours["name"] == row.name), "dur_ns"].sum()
        assert ns * 1e-9 == pytest.approx(row.total_s, abs=1e-9)


def test_launches_join_on_our_correlation(dlrm):
    theirs = hta.launches(dlrm[0])
    rank0 = theirs[theirs["rank"] == 0]
    spans = dlrm[1].spans
    kernels = spans[(spans["rank"] == 0) & (spans["stream"] >= 0) & spans["correlation"].isin(rank0["correlation"])]
    assert len(rank0) == len(kernels) > 200
    assert rank0["gpu_s"].sum() == pytest.approx(kernels["dur_ns"].sum() * 1e-9)


def test_idle_shares_and_queue(dlrm):
    idle = hta.idle(dlrm[0])
    shares = idle.groupby(["rank", "stream"])["share"].sum()
    np.testing.assert_allclose(shares[idle.groupby(["rank", "stream"])["idle_s"].sum() > 0], 1, atol=0.02)
    queue = hta.queue(dlrm[0])
    assert sorted(queue["rank"].unique()) == list(range(8)) and (queue["max"] >= queue["mean"]).all()


def test_a_rank_without_gpu_does_not_hide_the_others():
    files = [local_or_skip("traces/hta-samples/nccl_data.json.gz"), dataset_or_skip("vit-ddp") / "rank1.json.gz"]
    with pytest.warns(TraceWarning, match=r"without GPU rows .rank 1."):
        table = hta.beside_hta(files)
    assert table.loc[(table["rank"] == 0), "error"].abs().max() <= 1e-4 and len(table) == 10


def test_cpu_traces_give_empty_tables_and_say_so():
    path = dataset_or_skip("vit-ddp")
    analysis = hta.analysis(path)
    for what in (hta.temporal, hta.idle, hta.queue):
        with pytest.warns(TraceWarning, match="HTA"):
            assert not len(what(analysis))
    assert hta.overlap(analysis)["overlap"].isna().all()
    assert not len(hta.launches(analysis)) and not len(hta.kernels(analysis))
    assert breakdown(read_trace(path))["comm_s"].min() > 0
