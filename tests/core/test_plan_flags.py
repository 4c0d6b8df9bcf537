"""Flags of Megatron-LM and configurations of torchtitan as people have them, to plans; what a plan cannot say."""

import pytest

from madmax_lib.plan import Plan

GPT3 = """torchrun --nproc-per-node 8 --nnodes=128 pretrain_gpt.py \\
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --num-layers-per-virtual-pipeline-stage 1 \\
    --num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --bf16 --lr 6.0e-5 \\
    --micro-batch-size 1 --global-batch-size 1536 --sequence-parallel --recompute-activations \\
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --data-path my-gpt2_text_document"""


@pytest.mark.parametrize(
    ("args", "world", "plan"),
    [
        ("", None, Plan(bucket_bytes=float("inf"))),
        (GPT3, None, Plan(dp=8, tp=8, pp=16, interleave=6, zero=1, recompute="selective", reduce_fp32=True,
                          overlap_gather=True, bucket_bytes=160e6)),
        (["--tensor-model-parallel-size", "4", "--context-parallel-size=2", "--cp-comm-type", "a2a", "--fp16"], 16,
         Plan(dp=2, tp=4, cp=2, context="ulysses", sequence_parallel=False, bucket_bytes=float("inf"))),
        ({"tensor_model_parallel_size": 2, "expert_model_parallel_size": 8, "sequence_parallel": True,
          "world_size": 16, "bf16": False, "recompute_granularity": None, "moe_expert_capacity_factor": 1.25},
         None, Plan(dp=8, tp=2, ep=8, capacity=1.25, bucket_bytes=float("inf"))),
        ("--expert-model-parallel-size 8 --recompute-granularity full --recompute-method uniform", None,
         Plan(dp=8, ep=8, recompute="full", bucket_bytes=float("inf"))),
        ("--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 "
         "--decoder-last-pipeline-num-layers 6", 8,
         Plan(dp=2, pp=4, interleave=2, last_layers=6, bucket_bytes=float("inf"))),
        ("--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split --num-layers 14 "
         "--pipeline-model-parallel-size 4", 4,
         Plan(pp=4, embedding_as_layer=True, head_as_layer=True, bucket_bytes=float("inf"))),
        ("--expert-model-parallel-size 8 --expert-tensor-parallel-size 1 --tensor-model-parallel-size 4 --bf16 "
         "--sequence-parallel --tp-comm-overlap --overlap-moe-expert-parallel-comm", None,
         Plan(dp=2, tp=4, ep=8, etp=1, overlap_tp=True, overlap_ep=True, reduce_fp32=True,
              bucket_bytes=float("inf"))),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --tp-comm-overlap", 32,
         Plan(dp=32, zero=3, bucket_bytes=float("inf"))),
        ("--use-distributed-optimizer --num-distributed-optimizer-instances 4 --transformer-impl local", 32,
         Plan(dp=32, zero=1, shard=8, attention="unfused", bucket_bytes=float("inf"))),
        ("--data-parallel-size 2 --checkpoint-activations --optimizer-cpu-offload", None,
         Plan(dp=2, recompute="full", offload="optimizer", bucket_bytes=float("inf"))),
    ],
)  # fmt: skip
def test_megatron(args, world, plan):
    assert Plan.from_megatron(args, world_size=world) == plan


@pytest.mark.parametrize(
    ("args", "world", "message"),
    [
        ("--tensor-model-parallel-size 3", 8, "tp x pp x cp = 3 does not divide world size 8"),
        ("--tensor-model-parallel-size two", 8, "--tensor-model-parallel-size=two is not a whole number"),
        ("--tensor-model-parallel-size 2 --tensor_model_parallel_size=4", 8, "given twice, as 2 and as 4"),
        ("--nproc-per-node 8", 16, "different numbers of devices: 16, 8"),
        ("--recompute-activations --recompute-granularity full", 1, "is selective, but --recompute-granularity=full"),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 1", 1, "every layer or none"),
        ("--recompute-granularity selective --recompute-modules mlp", 1, "a plan recomputes core_attn alone"),
        ("--num-layers-per-virtual-pipeline-stage 2 --pipeline-model-parallel-size 2", 2, "=2 needs --num-layers"),
        ("--num-layers-per-virtual-pipeline-stage 3 --pipeline-model-parallel-size 2 --num-layers 16", 2,
         "pp x 3 does not divide 16 layers"),
        ("--num-layers-per-virtual-pipeline-stage 2 --num-virtual-stages-per-pipeline-rank 2", 2, "exclude each other"),
        ("--expert-model-parallel-size 2 --expert-tensor-parallel-size 3 --tensor-model-parallel-size 4", 4,
         "etp=3 does not divide tp=4"),
        ("--pipeline-model-parallel-layout Et*3|(tt|)*29", 1, "-parallel-layout=.*could change the plan"),
        ("--context-parallel-size 2 --cp-comm-type all_gather", 2, "--cp-comm-type=all_gather: a plan knows p2p, a2a"),
        ("--overlap-param-gather", 2, "overlap_gather is for zero=1 and zero=2, but zero=0"),
        ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
         "--decoder-first-pipeline-num-layers 3", 2, "=3 is not a multiple of the 2 virtual stages"),
        ("--account-for-loss-in-pipeline-split --num-layers 16 --pipeline-model-parallel-size 4", 4,
         r"16 \+ 1 layers do not divide over 4 stages"),
        ("--expert-model-parallel-size 3", 8, "ep=3 does not divide dp x cp = 8 x 1"),
    ],
)  # fmt: skip
def test_megatron_refused(args, world, message):
    with pytest.raises(ValueError, match=message) as error:
        Plan.from_megatron(args, world_size=world)
    assert "\n" not in str(error.value)


LLAMA = """
[model]
name = "llama3"
flavor = "405B"
[training]
local_batch_size = 2
seq_len = 8192
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 8  # 8-way TP
enable_async_tensor_parallel = true
pipeline_parallel_degree = 1
context_parallel_degree = 1
[activation_checkpoint]
mode = "full"
"""


def titan(parallelism="", training="", checkpoint=""):
    tables = {"parallelism": parallelism, "training": training, "activation_checkpoint": checkpoint}
    return "".join(f"[{name}]\n{text}\n" for name, text in tables.items())


PIPELINE = "pipeline_parallel_degree = 4\ndata_parallel_shard_degree = 2\n"


@pytest.mark.parametrize(
    ("text", "options", "plan"),
    [
        (LLAMA, {"world_size": 512},
         Plan(dp=64, tp=8, zero=3, micro_batch=2, recompute="full", reduce_fp32=True, overlap_tp=True)),
        (titan("data_parallel_replicate_degree = 4\ndata_parallel_shard_degree = 8", "local_batch_size = 1",
               'mode = "selective"\nselective_ac_option = "op"'), {},
         Plan(dp=32, shard=8, zero=3, recompute="selective", reduce_fp32=True)),
        (titan("data_parallel_replicate_degree = 8\ndata_parallel_shard_degree = 1", "batch_size = 1", 'mode = "none"'),
         {}, Plan(dp=8, reduce_fp32=True)),
        (titan("data_parallel_shard_degree = 4\ncontext_parallel_degree = 2\nexpert_parallel_degree = 8",
               'local_batch_size = 1\nmixed_precision_reduce = "bfloat16"\nenable_cpu_offload = true', 'mode = "none"'),
         {}, Plan(dp=4, cp=2, ep=8, zero=3, offload="all")),
        (titan("data_parallel_shard_degree = 4\ntensor_parallel_degree = 2\nexpert_parallel_degree = 8",
               "local_batch_size = 1", 'mode = "none"'), {},
         Plan(dp=4, tp=2, ep=8, etp=1, zero=3, reduce_fp32=True)),
        (titan(PIPELINE + 'pipeline_parallel_schedule = "Interleaved1F1B"', "local_batch_size = 8", 'mode = "none"'),
         {"world_size": 8}, Plan(dp=2, pp=4, interleave=2, zero=2, overlap_gather=True, embedding_as_layer=True,
                                 head_as_layer=True, reduce_fp32=True)),
        (titan(PIPELINE + 'pipeline_parallel_schedule = "Interleaved1F1B"\npipeline_parallel_layers_per_stage = 2\n'
               'fsdp_reshard_after_forward = "always"\npipeline_parallel_microbatch_size = 4', "local_batch_size = 8",
               'mode = "none"'), {"layers": 30},
         Plan(dp=2, pp=4, interleave=4, zero=3, embedding_as_layer=True, head_as_layer=True, reduce_fp32=True,
              micro_batch=4)),
    ],
)  # fmt: skip
def test_torchtitan(text, options, plan, tmp_path):
    assert Plan.from_torchtitan(text, **options) == plan
    path = tmp_path / "config.toml"
    path.write_text(text)
    assert Plan.from_torchtitan(path, **options) == Plan.from_torchtitan(str(path), **options) == plan


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (titan("data_parallel_shard_degree = -1"), {}, "data_parallel_shard_degree=-1 is the rest of the world"),
        (titan("data_parallel_shard_degree = 4"), {"world_size": 16}, r"= 1 x 4 x 1 is not the world size 16"),
        (titan("tensor_parallel_degree = 3\ndata_parallel_shard_degree = -1"), {"world_size": 8}, "not the world size"),
        (titan("tensor_parallel_degree = 0", ""), {"world_size": 8}, "tensor_parallel_degree=0 must be a whole number"),
        (titan("data_parallel_shard_degree = 1\nwarp_degree = 2"), {}, "parallelism.warp_degree=2: not known"),
        (titan(PIPELINE + 'pipeline_parallel_schedule = "ZBVZeroBubble"'), {}, "=zbvzerobubble: a plan knows 1f1b"),
        (titan(PIPELINE + "pipeline_parallel_layers_per_stage = 2"), {}, "=2 needs the number of layers"),
        (titan(PIPELINE + "pipeline_parallel_layers_per_stage = 2"), {"layers": 30}, "makes 16 stages of 30 layers"),
        (titan("data_parallel_shard_degree = 2", "", 'mode = "selective"\nselective_ac_option = "2"'), {},
         "selective_ac_option=2: a plan recomputes every layer or none"),
        (titan(PIPELINE + "pipeline_parallel_microbatch_size = 3", "local_batch_size = 8"), {},
         "pipeline_parallel_microbatch_size=3 does not divide local_batch_size=8"),
        (titan("data_parallel_shard_degree = 4\ntensor_parallel_degree = 2\nexpert_parallel_degree = 4\n"
               "expert_tensor_parallel_degree = 3"), {}, "etp=3 does not divide tp=2"),
        ("[parallelism\n", {}, r"configuration: not TOML .*line 1"),
    ],
)  # fmt: skip
def test_torchtitan_refused(text, options, message):
    with pytest.raises(ValueError, match=message) as error:
        Plan.from_torchtitan(text, **options)
    assert "\n" not in str(error.value)


def test_a_configuration_that_is_not_there():
    with pytest.raises(FileNotFoundError):
        Plan.from_torchtitan("no_such.toml")
