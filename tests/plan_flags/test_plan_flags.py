"""Configurations of frameworks as people have them, to plans and back; what a plan, or
a framework, cannot say.
"""

import itertools
import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from support import local_or_skip

from madmax_lib import plan_flags
from madmax_lib.catalog.software import OVERLAPS
from madmax_lib.catalog.tables import model, names
from madmax_lib.plan.case import Case
from madmax_lib.plan.columns import Plans
from madmax_lib.plan.legal import legal
from madmax_lib.plan.plan import DEFAULTS, Plan
from madmax_lib.plan.rules import STATED
from madmax_lib.plan_flags.keys import FRAMEWORKS
from madmax_lib.plan_flags.text import source_of

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
        ("--data-parallel-size 2 --optimizer-cpu-offload", None,
         Plan(dp=2, offload="optimizer", bucket_bytes=float("inf"))),
    ],
)  # fmt: skip
def test_megatron(args, world, plan):
    assert plan_flags.read(args, "megatron-lm", world_size=world).plan == plan


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
        ("--checkpoint-activations", 1, "no longer takes it"),
        ("--expert-model-parallel-size 3", 8, "ep=3 does not divide dp x cp = 8 x 1"),
    ],
)  # fmt: skip
def test_megatron_refused(args, world, message):
    with pytest.raises(ValueError, match=message) as error:
        plan_flags.read(args, "megatron-lm", world_size=world)
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
    tables = {
        "parallelism": parallelism,
        "training": training,
        "activation_checkpoint": checkpoint,
    }
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
    assert plan_flags.read(text, "torchtitan", **options).plan == plan
    path = tmp_path / "config.toml"
    path.write_text(text)
    assert plan_flags.read(path, "torchtitan", **options).plan == plan


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
        plan_flags.read(text, "torchtitan", **options)
    assert "\n" not in str(error.value)


def test_a_configuration_that_is_not_there():
    with pytest.raises(FileNotFoundError):
        plan_flags.read("no_such.toml", "torchtitan")


# fields that a file does not fix, or that came after the expected values were worked
# out
FREE = {"prefetch", "bucket_bytes", "attention", "capacity", *OVERLAPS}


def differences(stated, expected):
    """What a configuration states otherwise than expected; of a partial one only what
    is listed counts.
    """
    plan, listed = vars(stated.plan), expected["plan"]
    free = (
        FREE
        | set(expected.get("free", ()))
        | (set(DEFAULTS) if expected.get("partial") else set())
    )
    wanted = {name: value for name, value in DEFAULTS.items() if name not in free}
    wanted |= {"sequence_parallel": stated.plan.tp > 1} | listed
    if expected.get("partial"):
        wanted = listed
    run = {
        name: value
        for name, value in expected.get("settings", {}).items()
        if hasattr(stated, name)
    }
    found = {name: plan[name] for name in wanted} | {
        name: getattr(stated, name) for name in run
    }
    return {
        name: (found[name], value)
        for name, value in (wanted | run).items()
        if found[name] != value
    }


def test_files_state_what_their_frameworks_would_run():
    """Real files, each with the plan that its framework's code makes of it, which
    written again is read as the same.
    """
    folder, wrong = local_or_skip("configs/expected.json").parent, {}
    for name, expected in json.loads((folder / "expected.json").read_text()).items():
        if name.startswith("_"):
            continue
        try:
            stated = plan_flags.read(
                folder / name,
                world_size=expected["world_size"],
                layers=expected.get("layers"),
            )
        except ValueError as error:
            every, some = (
                expected.get("refused", ()),
                expected.get("refused_any", ("",) if "refused" in expected else ()),
            )
            if not (
                all(word in str(error) for word in every)
                and any(word in str(error) for word in some)
            ):
                wrong[name] = str(error)
            continue
        wrong |= {name: "not refused"} if "plan" not in expected else {}
        if "plan" in expected and (found := differences(stated, expected)):
            wrong[name] = found
        given = {"layers": expected.get("layers"), "world_size": expected["world_size"]}
        run = {
            what: getattr(stated, what)
            for what in ("global_batch", "sequence", "dtype")
        }
        text = plan_flags.write(
            stated.plan, stated.framework, layers=given["layers"], **run
        )
        if plan_flags.read(text, stated.framework, **given).plan != stated.plan:
            wrong[name] = f"comes back otherwise: {text}"
    assert not wrong


CHOICES = {  # what a search tries, and what else a pipeline's ends may be
    "pp": (1, 1, 2, 4, 8), "tp": (1, 2, 4), "cp": (1, 1, 2, 4), "ep": (1, 1, 2, 4, 8), "etp": (0, 0, 1),
    "zero": (0, 1, 2, 3), "micro_batch": (1, 2, 4), "recompute": ("none", "selective", "full"),
    "interleave": (1, 1, 2, 3, 4), "schedule": ("1f1b", "gpipe", "zero-bubble"), "context": ("ring", "ulysses"),
    "shard": (0, 0, 2, 4, 8), "overlap_gather": (False, True), "reduce_fp32": (False, True), "prefetch": (0, 1),
    "sequence_parallel": (False, True), "attention": ("flash", "unfused"), "first_layers": (0, 0, 0, 1, 2, 3),
    "last_layers": (0, 0, 0, 1, 2, 4), "embedding_as_layer": (False, False, True),
    "head_as_layer": (False, False, True), "qwz": (False, False, True), "hpz": (False, False, True), "qgz": (False,),
}  # fmt: skip
FURTHER = [
    {"offload": "optimizer"},
    {"offload": "all"},
    {"bucket_bytes": math.inf},
]  # which it does not


def drawn_plans(rng, trained, software, size):
    """Plans that a software launches and its configuration can say; what changes
    nothing stands at its default.
    """
    plan = {name: rng.choice(values, size) for name, values in CHOICES.items()}
    plan["dp"] = np.maximum(
        rng.choice((8, 16, 64), size) // (plan["tp"] * plan["pp"] * plan["cp"]), 1
    )
    ranks = plan["dp"] * plan["cp"]
    moot = {
        "zero": ranks == 1, "reduce_fp32": ranks == 1, "prefetch": (plan["zero"] < 3) | (ranks == 1),
        "shard": plan["shard"] == ranks, "etp": (plan["ep"] == 1) | (plan["tp"] == 1), "context": plan["cp"] == 1,
        "overlap_gather": ranks == 1, "sequence_parallel": plan["tp"] == 1, "qgz": plan["zero"] < 3,
    } | dict.fromkeys(("interleave", "schedule", "first_layers", "last_layers"), plan["pp"] == 1)  # fmt: skip
    moot |= dict.fromkeys(("embedding_as_layer", "head_as_layer"), plan["pp"] == 1)
    moot |= dict.fromkeys(("qwz", "hpz"), plan["zero"] < 3)
    default = DEFAULTS | {"sequence_parallel": False}
    plan |= {
        name: np.where(nothing, default[name], plan[name])
        for name, nothing in moot.items()
    }
    plans = Plans(**plan)
    rows = np.flatnonzero(
        legal(Case(trained, None, plans, software=software), STATED).mask
    )
    return [Plan(**vars(plans[row])) for row in rows]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_round_trip(framework):
    """500 random plans that a search could find for a framework's software, written and
    read back.
    """
    rng, written, refused = np.random.default_rng(20), 0, set()
    software = {"megatron-lm": "megatron-core"}.get(framework, framework)
    models = itertools.cycle(
        map(
            model,
            ("llama3-8b", "llama3-70b", "mixtral-8x7b", "gpt3-175b", "deepseek-v3"),
        )
    )
    while written < 500:
        trained = next(models)
        for plan in drawn_plans(rng, trained, software, 40_000)[: 500 - written][:120]:
            batch = plan.dp * plan.micro_batch * plan.pp * int(rng.choice((1, 2, 8)))
            sizes = (
                {"model": trained}
                if written % 2
                else {"sequence": trained.sequence, "layers": trained.layers}
            )
            run = {"global_batch": batch} | sizes
            text = plan_flags.write(plan, framework, **run)
            assert (
                framework != "deepspeed"
                or deepspeed_samples(json.loads(text), plan) == batch
            ), text
            stated = plan_flags.read(
                text, world_size=plan.world_size, layers=trained.layers
            )
            moot = {"reduce_fp32": plan.reduce_fp32} if plan.dp * plan.cp == 1 else {}
            assert Plan(**vars(stated.plan) | moot) == plan, text
            assert (stated.framework, stated.global_batch, stated.sequence, stated.dtype) == (
                framework, batch, trained.sequence, "bf16"), text  # fmt: skip
            written += 1
            if written % 5 == 0 and plan.dp * plan.cp > 1:
                refused |= not_written(
                    plan,
                    FURTHER[written // 5 % len(FURTHER)],
                    framework,
                    trained.layers,
                    run,
                )
    assert all(
        "cannot state" in words or "bucket_bytes=inf" in words for words in refused
    )


def deepspeed_samples(config, plan):
    """Samples of a step by the rules of DeepSpeed 0.19.8, runtime/config.py, which
    counts ranks of AutoTP at first.
    """
    ranks = config.get("data_parallel_size") or plan.dp * plan.tp
    micro, steps = (
        config["train_micro_batch_size_per_gpu"],
        config["gradient_accumulation_steps"],
    )
    assert (
        config.get("train_batch_size", micro * steps * ranks) == micro * steps * ranks
    )
    return (
        micro * steps * ranks // config.get("tensor_parallel", {}).get("autotp_size", 1)
    )


def not_written(plan, further, framework, layers, run):
    """Why a plan with further choices is not written; nothing if it comes back with
    them.
    """
    try:
        text = plan_flags.write(replace(plan, **further), framework, **run)
    except ValueError as error:
        return {str(error)}
    again = plan_flags.read(text, world_size=plan.world_size, layers=layers).plan
    kept = {name: getattr(again, name) == value for name, value in further.items()}
    assert all(kept.values()) or (plan.zero == 3 and "bucket_bytes" in further), text
    return set()


LANGUAGE = [
    name
    for name in names("models")
    if getattr(model(name), "vocab", 0) and not model(name).sinks
]
STACKS = [name for name in LANGUAGE if model(name).blocks]


@pytest.mark.parametrize("name", STACKS)
def test_flags_of_several_kinds_of_layers_are_not_made_up(name):
    for framework in ("megatron-lm", "megatron-bridge"):
        with pytest.raises(
            ValueError, match=f"{name}: Megatron's flags of layers .* are not written"
        ):
            plan_flags.write("dp8", framework, model=name)
    assert f"blocks={','.join(model(name).layer_kinds)}" in plan_flags.write(
        "dp8.z3", "deepspeed", model=name, global_batch=8
    )


@pytest.mark.parametrize("name", [name for name in LANGUAGE if name not in STACKS])
def test_megatron_builds_the_model(name):
    """The flags that are written give the parameters of the model, counted as
    Megatron-LM makes its weights.
    """
    flags, ours = (
        source_of(plan_flags.write("dp8", "megatron-lm", model=name)).values,
        model(name),
    )
    h, ffn, heads, layers = (
        flags[key]
        for key in (
            "hidden-size",
            "ffn-hidden-size",
            "num-attention-heads",
            "num-layers",
        )
    )
    width, groups, bias = (
        flags.get("kv-channels", h // heads),
        flags.get("num-query-groups", heads),
        0,
    )
    norm, matrices = (
        h * (1 if flags.get("normalization") else 2),
        3 if "swiglu" in flags else 2,
    )
    attention = h * width * (2 * heads + 2 * groups) + 2 * width * (
        "qk-layernorm" in flags
    )
    if rank := flags.get("kv-lora-rank"):
        q, far, v = (
            flags[key] for key in ("qk-head-dim", "qk-pos-emb-head-dim", "v-head-dim")
        )
        up, rank_q = heads * (q + far), flags.get("q-lora-rank", 0)
        attention = (h * rank_q + rank_q * up + rank_q) if rank_q else h * up
        attention += h * (rank + far) + rank + rank * heads * (q + v) + heads * v * h
    if "disable-bias-linear" not in flags:
        attention, bias = (
            attention + width * (heads + 2 * groups) + h,
            (matrices - 1) * ffn + h,
        )
    elif "add-qkv-bias" in flags:
        attention += width * (heads + 2 * groups)
    sparse, dense_part = 0, matrices * h * ffn + bias
    if experts := flags.get("num-experts"):
        of_expert = matrices * h * flags["moe-ffn-hidden-size"]
        of_expert += (
            (matrices - 1) * flags["moe-ffn-hidden-size"] + h
            if "disable-bias-linear" not in flags
            else 0
        )
        sparse = experts * of_expert + matrices * h * flags.get(
            "moe-shared-expert-intermediate-size", 0
        )
        sparse += experts * (h + ("moe-router-enable-expert-bias" in flags))
    mixtures = [int(bool(experts))] * layers
    if pattern := flags.get("moe-layer-freq"):
        runs = re.findall(r"\[(\d)\]\*(\d+)", pattern) or [
            (kind, 1) for kind in re.findall(r"\d", pattern)
        ]
        mixtures = [int(kind) for kind, count in runs for _ in range(int(count))]
    total = (
        sum(sparse if mixture else dense_part for mixture in mixtures)
        + layers * (attention + 2 * norm)
        + norm
    )
    total += (
        flags["vocab-size"]
        * h
        * (2 if "untie-embeddings-and-output-weights" in flags else 1)
    )
    total += (
        flags["max-position-embeddings"]
        * h
        * (flags["position-embedding-type"] == "learned_absolute")
    )
    assert (
        total
        == ours.parameters
        - ours.other_parameters
        - layers * ours.other_layer_parameters
    )


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_configuration_names_its_model(framework):
    """Of a catalog's model, and of one that no framework knows; a recommendation model
    has none.
    """
    plan = "dp8.z3.reduce-fp32" if framework == "torchtitan" else "dp8.z3"
    text = plan_flags.write(plan, framework, model="llama3-8b", global_batch=16)
    assert ("llama3_8b" if framework == "torchtitan" else "14336") in text
    mine = replace(model("llama3-8b"), layers=31)
    assert "31" in plan_flags.write(plan, framework, model=mine) and "8192" in text
    with pytest.raises(
        ValueError, match="dlrm-a: recommendation models have no configuration"
    ):
        plan_flags.write(plan, framework, model="dlrm-a")


DUMP = {"model_spec": {"name": "llama3"}, "training": {"num_tokens_per_microbatch_per_dp_rank": 8192,
        "max_context_length": 4096}, "parallelism": {"data_parallel_shard_degree": -1, "pipeline_parallel_degree": 2,
        "pipeline_parallel_schedule": "Interleaved1F1B", "num_pp_microbatches": 4},
        "activation_checkpoint": {"debug": False}}  # fmt: skip
LOGGED = "\n".join(
    f"[rank0]:{line}" for line in json.dumps(DUMP, indent=2).splitlines()
)
SCRIPT = """#!/bin/bash
NNODES=${SLURM_NNODES:-"1"}
TP=2  # ranks
GPT_ARGS=(
    --tensor-model-parallel-size $TP --sequence-parallel
    # --pipeline-model-parallel-size 4
    "--micro-batch-size 2")
torchrun --nproc_per_node 8 --nnodes $NNODES pretrain_gpt.py ${GPT_ARGS[@]} --bf16 --overlap-grad-reduce"""
FSDP = "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 16\nnum_machines: 2\nfsdp_config:\n"


@pytest.mark.parametrize(
    ("source", "world", "text", "batch"),
    [
        (f"[rank0]:[titan] 2026-08-21 - root - INFO - Running with configs: {LOGGED}\n[rank0]:[titan] saved {{}}", 8,
         "dp4.pp2.z2.v2.mb2.full.embedding-layer.head-layer.overlap-gather.reduce-fp32", 32),
        ("--module llama3 --config llama3_8b --parallelism.tensor-parallel-degree=2 --training.local-batch-size 4 "
         "--parallelism.no-enable-sequence-parallel activation-checkpoint:selective", 8,
         "dp4.tp2.z3.mb4.nosp.selective.reduce-fp32", 16),
        (SCRIPT, None, "dp4.tp2.mb2.bucket160000000.reduce-fp32", 8),
        (SCRIPT, 64, "dp32.tp2.mb2.bucket160000000.reduce-fp32", 64),
        ("--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout Et|(tt|)*2tL --fp16", 4,
         "dp1.pp4.embedding-layer.head-layer.one-bucket", None),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*3|tL --fp16", 2,
         "dp1.pp2.first3.last1.one-bucket", None),
        ("--use-megatron-fsdp --use-distributed-optimizer --overlap-grad-reduce --bf16 --main-grads-dtype bf16", 8,
         "dp8.z3.bucket80000000", None),
        ({"model": {"tensor_model_parallel_size": 2}, "ddp": {"use_distributed_optimizer": True},
          "mixed_precision": "bf16_mixed", "comm_overlap": None}, 8,
         "dp4.tp2.nosp.z1.overlap-gather.reduce-fp32.bucket536870912", None),
        ({"ddp": {"grad_reduce_in_fp32": True}, "mixed_precision": {"bf16": True, "grad_reduce_in_fp32": False}}, 4,
         "dp4.one-bucket", None),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True, "mics_shard_size": -1},
          "train_batch_size": 64, "train_micro_batch_size_per_gpu": 2}, 16, "dp16.z3.mb2.qwz.bucket1000000000", 64),
        *[({"train_batch_size": total, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 8,
            "tensor_parallel": {"autotp_size": 2}}, 8, "dp4.tp2.nosp.mb2.bucket1000000000", 64) for total in (128, 64)],
        ({"_comment": "script: global_batch_size=64", "train_micro_batch_size_per_gpu": 2,
          "gradient_accumulation_steps": 8, "tensor_parallel": {"autotp_size": 2}}, None,
         "dp4.tp2.nosp.mb2.bucket1000000000", 64),
        ('// comment\n{"train_batch_size": 16, "zero_optimization": {"stage": 1, "reduce_bucket_size": 5e6}}', 8,
         "dp8.z1.mb2.bucket10000000", 16),
        (FSDP + "  fsdp_sharding_strategy: HYBRID_SHARD_ZERO2", None, "dp16.z2.hs8.overlap-gather", None),
        (FSDP.replace("FSDP", "DEEPSPEED").replace("fsdp", "deepspeed") + "  zero_stage: 3\n"
         "parallelism_config:\n  parallelism_config_sp_size: 4", None, "dp4.cp4.z3.ulysses.bucket1000000000", None),
        (FSDP.replace("FSDP", "MEGATRON_LM").replace("fsdp", "megatron_lm") + "  megatron_lm_tp_degree: 4\n"
         "  megatron_lm_sequence_parallelism: true", None, "dp4.tp4.one-bucket.reduce-fp32", None),
    ],
)  # fmt: skip
def test_forms(source, world, text, batch):
    stated = plan_flags.read(source, world_size=world)
    assert (str(stated.plan), stated.global_batch) == (str(Plan.parse(text)), batch)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "of no known framework .*no keys"),
        ("a: 1\nb: 2", "of no known framework .*it has a, b"),
        ("hello", "not a configuration: 'hello'"),
        ("{bad", "not JSON"),
        ("a: [1\nb", "not YAML"),
        ("--tensor-model-parallel-size 0", "=0 must be a whole number of at least 1"),
        ("--tensor-model-parallel-size $TP", r"=\$TP is not a whole number"),
        ("--warp-parallel-size 2", "not known, and it could change the plan"),
        ("--hybrid-layer-pattern M-|M-", "its | cuts the pipeline"),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 2", "layers=2: a plan recomp"),
        ("--recompute-granularity full", "needs --recompute-method"),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|ttm|L|", "could change the plan"),
        ({"zero_optimization": {"stage": 3, "warp": 1}}, "zero_optimization.warp=1: not known"),
        ({"train_batch_size": 30, "train_micro_batch_size_per_gpu": 4}, "=30 is no multiple of 4 x 8"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}, "train_batch_size": 8}, "exclude each other"),
        ({"train_batch_size": 8, "optimizer": {"type": "OneBitAdam"}}, "it sends signs of gradients"),
        ({"train_batch_size": 8, "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
         "offloads parameters with the optimizer"),
        ({"distributed_type": "TPU"}, "distributed_type=TPU: not NO, MULTI_GPU"),
        (FSDP + "  fsdp_warp: 1", "fsdp_config.fsdp_warp=1: not known"),
        ({"model": {"name": "flux"}, "parallelism": {}, "activation_checkpoint": {"mode": "full"}}, "language model"),
        ({"model": {"tensor_model_parallel_size": 2, "cpu_offloading": True}}, "model.cpu_offloading=True: a"),
    ],
)  # fmt: skip
def test_refused(source, message):
    with pytest.raises(ValueError, match=message) as error:
        plan_flags.read(source, world_size=8)
    assert "\n" not in str(error.value)


def test_harmless_keys_are_listed():
    words = "scatter_embedding_sequence_parallel cpu_offloading_activations deallocate_pipeline_outputs parallel_output"
    assert plan_flags.read({"model": dict.fromkeys(words.split(), True)}).plan == Plan(
        bucket_bytes=math.inf
    )
    stated = plan_flags.read(
        "--bf16 --log-num-zeros-in-grad --dist-ckpt-optim-fully-reshardable --fp8-format hybrid"
    )
    assert stated.harmless == (
        "log-num-zeros-in-grad",
        "dist-ckpt-optim-fully-reshardable",
        "fp8-format",
    )
    assert stated.notes == (
        "--fp8-format=hybrid: fp8 is of the products, which a plan does not say",
    )


@pytest.mark.parametrize(
    ("plan", "framework", "run", "message"),
    [
        (
            "dp4",
            "nanotron",
            {},
            "framework='nanotron' is not one of torchtitan, megatron-lm, megatron-bridge",
        ),
        (
            "dp4.mb2",
            "megatron",
            {"global_batch": 12},
            "dp x micro_batch = 4 x 2; the nearest is 16",
        ),
        (
            "dp4.z1",
            "torchtitan",
            {},
            "torchtitan cannot state zero=1: its configuration would run zero=2",
        ),
        ("dp2.pp2.zb", "torchtitan", {}, "cannot state schedule=zero-bubble"),
        ("dp4.pp2.v4.reduce-fp32", "torchtitan", {}, "give layers="),
        (
            "dp2.pp2.gpipe",
            "megatron-core",
            {},
            "cannot state schedule=gpipe: its configuration would run schedule=1f1b",
        ),
        ("dp8.z3.selective", "deepspeed", {}, "cannot state recompute=selective"),
        ("dp2.pp2", "accelerate", {}, "cannot state pp=2"),
        (
            "tp5",
            "megatron",
            {"model": "gpt2"},
            "tp=5 does not divide 12 attention heads of gpt2",
        ),
        (
            "dp2.pp8.v2",
            "megatron",
            {"model": "gpt2"},
            "pp x interleave = 8 x 2 exceeds 12 layers of gpt2",
        ),
        (
            "dp2.cp2.z3",
            "accelerate",
            {"model": "gpt2", "sequence": 1023},
            "cp=2 does not divide 1023 tokens of gpt2",
        ),
        ("dp4.ep2", "deepspeed", {"model": "gpt2"}, "ep=2, but gpt2 has no experts"),
        (
            "dp4",
            "deepspeed",
            {"dtype": "int4"},
            "dtype=int4 is not one of bf16, fp16, fp32",
        ),
        ("dp4.cp2.z3.hs1", "accelerate", {}, "shard=1 must be a multiple of cp=2"),
        (
            "dp2.tp2.pp2.nosp",
            "deepspeed",
            {},
            "autotp_size=2: AutoTP leaves no ranks to a pipeline",
        ),
        (
            "dp2.tp2.cp2.ulysses.nosp.z3",
            "deepspeed",
            {},
            "=2: AutoTP leaves no ranks to sequence parallelism",
        ),
    ],
)
def test_not_written(plan, framework, run, message):
    with pytest.raises(ValueError, match=message):
        plan_flags.write(plan, framework, **run)
