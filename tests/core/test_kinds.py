import pytest

from madmax_lib.kinds import COLLECTIVES, collective_names, kernel_kinds, load_kinds

NAMES = [
    ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", "comm", "all_reduce"),
    ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096>)", "comm", "all_reduce"),
    ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096>)", "comm", "all_gather"),
    ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "comm", "reduce_scatter"),
    ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*)", "comm", "send_recv"),
    ("ncclKernel_Broadcast_RING_LL_Sum_int8_t", "comm", "broadcast"),
    ("ncclDevKernel_Reduce_Sum_f32", "comm", "reduce"),
    ("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", "comm", "generic"),
    ("void rcclGenericKernel<1, false>", "comm", "generic"),
    ("NCCLDEVKERNEL_ALLREDUCE", "comm", "all_reduce"),
    ("multimem_all_reduce_kernel<c10::BFloat16>", "comm", "all_reduce"),
    ("void vllm::cross_device_reduce_1stage<half>", "comm", "all_reduce"),
    ("one_shot_all_reduce_kernel", "comm", "all_reduce"),
    ("void deep_ep::internode::dispatch<false, 8>", "comm", "dispatch"),
    ("void dpsk::ep::internode::combine<false, 8>", "comm", "combine"),
    ("void deep_ep::intranode::cached_notify_combine<2>", "comm", "combine"),
    ("gloo:all_reduce", "comm", "all_reduce"),
    ("gloo:send", "comm", "send_recv"),
    ("gloo:barrier", "comm", "barrier"),
    ("gloo:reduce", "comm", "reduce"),
    ("gloo:gather", "comm", "gather"),
    ("void allreduce_fusion_kernel_oneshot_lamport<bf16>", "comm", "all_reduce"),
    ("nccl:all_reduce", "compute", ""),
    ("Memcpy DtoD (Device -> Device)", "memcpy", ""),
    ("Memset (Device)", "memcpy", ""),
    ("dma_request", "memcpy", ""),
    ("void at::native::reduce_kernel<512, 1>", "compute", ""),
    ("void dpsk::ep::cuda::get_dispatch_layout<256, 32, 8>", "compute", ""),
    ("groupnorm_kernel_dispatch_up<__hip_bfloat16>", "compute", ""),
    ("triton_poi_fused_all_reduce_0", "compute", ""),
    ("FSDP::all_gather (layers.0)", "compute", ""),
    ("c10d::_allgather_base_", "compute", ""),
    ("triton_red_fused_add_all_reduce_wait_tensor_2", "compute", ""),
    ("void LayerNormWarpImpl<WarpAllReduceSum>", "compute", ""),
    ("void at::native::vectorized_gather_kernel<16>", "compute", ""),
    ("moe_combine_kernel", "compute", ""),
    ("__amd_rocclr_fillBufferAligned", "memcpy", ""),
    ("event_wait", "other", ""),
]
LIBRARIES = {  # kernels of communication libraries, by collective
    "all_reduce": """oneShotAllReduceKernel oneshotAllreduceFusionKernel ddaAllReduceFlatIpc ddaAllReduceTreeIpc
        one_shot_mc_allreduce_kernel mscclpp::collective::allreduceNvlsPacket allreduceRsAg allreduce_prototype_twoshot
        userbuffers_fp16_sum_inplace_gpu_rr allreduce_one_shot_intra_node_kernel hcom_allReduce__123
        OneShotAllReduceSdmaKernel""",
    "all_gather": "ddaAllGatherIpc allgatherFullmesh allgather_vec allgather_lastdim OneShotAllGatherSdma",
    "reduce_scatter": "reduce_scatter_cross_device_store",
    "all_to_all": """_mxfp8_all_to_all_expert_major_kernel _combine_all_to_all_kernel moeAllToAllKernel allToAllV
        helixAllToAllKernel ulysses_a2a_kernel ddaAllToAllIpc all2all_single a2a_single_kernel""",
    "dispatch": "moeA2ADispatchKernel EpDispatchIntraNodeKernel deep_ep::elastic::hybrid_dispatch_impl",
    "combine": "moeA2ACombineKernel EpCombineInterNodeKernel deep_ep::elastic::combine_impl",
    "send_recv": "deep_ep::elastic::pp_send_impl put_signal_kernel wait_signal_kernel",
    "barrier": "barrier_all_intra_node CudaIpcBarrierAllKernel barrier_kernel deep_ep::internode::barrier",
    "generic": "kuserbuffers_pushrecv ubx_kernel_combine mscclKernel_Sum_half_Ring oneccl_kernel",
}
NAMES += [(name, "comm", collective) for collective, names in LIBRARIES.items() for name in names.split()]


@pytest.mark.parametrize(("name", "kind", "collective"), NAMES)
def test_names_of_the_field(name, kind, collective):
    assert kernel_kinds([name])[0] == kind
    if kind == "comm":
        assert collective_names([name])[0] == collective


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("comm", ["ncclKernel_AllReduce"]),
        ("compute", ["NcclKernel", "void ncclKernel", "Stream Wait Event", "volta_sgemm"]),
        ("memcpy", ["Memcpy DtoH", "dma_request"]),
        ("other", ["my Memcpy", "Event Sync"]),
    ],
)
def test_rules_of_hta(kind, names):
    assert set(kernel_kinds(names, rules="hta")) == {kind}


def test_user_rows_come_first(tmp_path):
    table = tmp_path / "kinds.csv"
    table.write_text("kind,pattern,collective\ncomm,^Memcpy PtoP,send_recv\n")
    kinds = load_kinds(table)
    assert kernel_kinds(["Memcpy PtoP (Device -> Device)", "Memset"], table=kinds).tolist() == ["comm", "memcpy"]
    assert collective_names(["Memcpy PtoP (Device -> Device)"], table=kinds)[0] == "send_recv"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind\ncomm\n", "needs the columns kind and pattern"),
        ("kind,pattern\nmagic,x\n", "kind 'magic' is not one of"),
        ("kind,pattern\ncomm,(\n", "is not a regular expression"),
        ("kind,pattern,rules\ncomm,x,Exact\n", "rules 'Exact' is not one of exact, device, hta"),
        ("", "not a table of kernel kinds"),
    ],
)
def test_bad_user_tables_are_refused(tmp_path, text, message):
    table = tmp_path / "kinds.csv"
    table.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_kinds(table)


def test_unknown_rules_are_refused():
    with pytest.raises(ValueError, match="rules='hat' is not one of exact, annotation, hta"):
        kernel_kinds(["x"], rules="hat")


def test_every_row_has_a_source_and_a_known_collective():
    table = load_kinds()
    assert (table["source"] != "").all()
    assert set(table.loc[(table["rules"] == "exact") & (table["kind"] == "comm"), "collective"]) <= set(COLLECTIVES)
