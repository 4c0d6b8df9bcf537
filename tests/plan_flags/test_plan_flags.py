"""Configurations of frameworks as people have them, to plans and back; what a plan, or
a framework, cannot say.
"""

import itertools
import json
import math
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from support import local_or_skip, refused, rows_beside

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

cases = partial(rows_beside, __file__)


@pytest.mark.parametrize("case", cases("read"), ids=lambda case: case["plan"])
def test_read(case, tmp_path):
    """The plan of a command line, a script, a dictionary, a log or a file."""
    sources = [case["source"]]
    if case["framework"] == "torchtitan":
        sources.append(tmp_path / "config.toml")
        sources[1].write_text(case["source"])
    for source in sources:
        stated = plan_flags.read(source, case["framework"], **case["options"])
        assert stated.plan == Plan.parse(case["plan"])
        assert "global_batch" not in case or stated.global_batch == case["global_batch"]


@pytest.mark.parametrize("case", cases("refused"), ids=lambda case: case["message"])
def test_refused(case):
    with pytest.raises(ValueError, match=case["message"]) as error:
        plan_flags.read(case["source"], case["framework"], **case["options"])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("case", cases("not_written"), ids=lambda case: case["message"])
def test_not_written(case):
    with pytest.raises(ValueError, match=case["message"]):
        plan_flags.write(case["plan"], case["framework"], **case["run"])


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


# refused when the expected values were worked out
SINCE = {
    "megatron/deepseekv3_proxy_flex.yaml": "dp32.tp2.pp4.ep16.etp1.z1.v2.bucket160000000"
    ".overlap-gather.reduce-fp32.layout-2x6+1+1m"
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
        if "plan" not in expected and str(stated.plan) != SINCE.get(name):
            wrong[name] = f"not refused: {stated.plan}"
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
    "zero": (0, 1, 2, 3), "micro_batch": (1, 2, 4), "recompute": ("none", "selective", "full", "layernorm+moe_act"),
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
    ways = ("cannot state", "does not say", "bucket_bytes=inf")
    assert all(any(way in words for way in ways) for words in refused)


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
        if indexers := flags.get("dsa-indexer-n-heads"):
            size = flags["dsa-indexer-head-dim"]
            # queries, keys with their norm, and a weight of each head
            attention += rank_q * indexers * size + h * size + 2 * size + h * indexers
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


def test_stages_that_a_stack_has_no_words_for_are_not_written():
    run = {"model": "llama3-8b", "global_batch": 512}
    assert "--num-layers 32" in plan_flags.write("pp4.dp8", "megatron-lm", **run)
    with refused("megatron-core does not say & pp x interleave = 5 x 1"):
        plan_flags.write("pp5.dp8", "megatron-lm", **run)


def test_what_deepspeed_leaves_to_the_script_is_noted():
    read = partial(plan_flags.read, world_size=8)
    full = plan_flags.write("dp8.z3.full", "deepspeed", global_batch=64)
    silent = plan_flags.write("dp8.z3", "deepspeed", global_batch=64)
    assert read(full).notes == ()
    assert read(silent).notes == ("recompute: the training script says it, here none",)


@pytest.mark.parametrize("kind", ["MULTI_GPU", "DEEPSPEED"])
def test_accelerate_for_other_processes_is_noted(kind):
    section = {"deepspeed_config": {"zero_stage": 2, "gradient_accumulation_steps": 1}}
    config = {"distributed_type": kind, "mixed_precision": "bf16"}
    config |= section if kind == "DEEPSPEED" else {}
    for stated, notes in ((3, ["num_processes=3: read for 8"]), (8, []), (None, [])):
        run = plan_flags.read(config | {"num_processes": stated}, world_size=8)
        assert [note for note in run.notes if "num_processes" in note] == notes


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
