"""What a wrong call is told: one line that names the argument and its value; and the
spellings that are taken.
"""

import json
import random
import warnings
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pytest
from support import cells

import madmax_lib as mm
from madmax_lib.base.fields import require_int, short_repr
from madmax_lib.catalog.models import DLRM, Transformer
from madmax_lib.plan.case import Case
from madmax_lib.plan.plan import _NUMBERS, _WORDS
from madmax_lib.planner import Space, variants
from madmax_lib.planner.space import Degrees, sharding_choices
from madmax_lib.simulator import Parameters, Policy, usable_bytes

MODEL, CLUSTER, PLAN, BATCH = "gpt2", "dgx-a100", "dp8.z1", {"global_batch": 64}
NAN, INF = float("nan"), float("inf")
TABLE = pd.DataFrame({"dp": [8], "step_s": [1.0]})
SMALL = {"layers": 2, "hidden": 64, "heads": 4, "ffn": 256}
SMALL |= {"sequence": 128, "vocab": 100}
DEVICE, LINK = mm.cluster(CLUSTER).device, mm.cluster(CLUSTER).inter


def step(plan=PLAN, model=MODEL, cluster=CLUSTER, door=mm.estimate, **change):
    return door(model, cluster, plan, **BATCH | change)


def searched(model=MODEL, cluster=CLUSTER, batch=64, **change):
    options = {"space": Space.quick(), "progress": False}
    return mm.search(model, cluster, batch, **options | change)


def held(plan=PLAN, model=MODEL, **change):
    return mm.memory(model, plan, **change)


def table(**columns):
    row = {"dp": [8]} | {name: [value] for name, value in columns.items()}
    return step(pd.DataFrame(row))


def check_refused(call, words):
    """A call is refused in one short line that holds the words, parted by " & "."""
    with warnings.catch_warnings(), pytest.raises(ValueError) as caught:
        warnings.simplefilter("error")
        call()
    said = str(caught.value)
    assert "\n" not in said and len(said) < 330
    assert all(word in said for word in words.split(" & ")), said


# Of every call that takes a step: the argument, wrong values, words of the answer.
ARGUMENTS = cells(
    """
    global_batch | None; 0; -8; 64.5; NAN; INF; "64"; [64]; True; dict() | global_batch=
    sequence | "8k"; 0; -1; 1.5; [1024]; NAN; INF; dict(); True | sequence=
    dtype | 16; None; "bf17"; ["bf16"]; float; "int4" | dtype= & not one of fp64, fp32
    dtype | "nvfp4"; "fp8" | a100-80 does not compute in
    software | 3; ["nemo"]; dict() | software & must be a Software or the name
    software | ""; " " | unknown software & nearest
    imbalance | "x"; None; [1]; 0.5; 1e30; NAN; INF | imbalance= & must be 1 to 1,000
    policy | 3; dict(); "x" | policy= & must be a Policy
    model | None; 5; [MODEL]; dict(); b"gpt2"; Transformer | model= & Model or the name
    model | ""; " "; "gpt9"; "gpt-tiny" | unknown model & nearest: & mm.RunSpec(model=...).shapes
    cluster | 5; [CLUSTER]; dict(); mm.model("gpt2") | cluster= & Cluster or the name
    cluster | None | cluster=None: a step needs a cluster
    cluster | ""; "dgx" | unknown cluster & nearest:
    plan | None; 3.5; {"dp": 8}; 8 | plan= & a Plan or its text, such as dp2.tp2.z3
    plan | "dp8/tp2"; "8"; "dp-8"; "dp8.0"; "tensor8"; "dp٣" | in plan & not one of dpN & dp2.tp8.z1.full
    plan | "dp8.dp8" | dp is given twice in plan 'dp8.dp8'
    plan | "dp4" | but dgx-a100 has 8 devices
    plan | "dp8.offload-all" | offload=all & needs zero=3 & zero=0
    plan | "dp8.mb16" | micro_batch=16 exceeds the 8 samples & of dp=8; nearest: micro_batch=8
    plan | "dp8.lora4096" | lora_rank=4096 exceeds the 768 channels of gpt2
    plan | "dp8.z3.no-overlap-dp" | overlap_dp=False & zero below 3
""",
    literal=False,
)


@pytest.mark.parametrize("door", [mm.estimate, mm.simulate, mm.fits])
@pytest.mark.parametrize(("name", "values", "words"), ARGUMENTS)
def test_wrong_arguments_of_a_step(door, name, values, words):
    for value in map(eval, values.split("; ")):
        check_refused(partial(step, door=door, **{name: value}), words)


# The call, wrong values in the place of its name X, words of the answer.
CALLS = cells(
    """
    step(parameters=X) | 3; dict(); []; 0; "shipped" | parameters= & must be a Parameters
    step(door=mm.simulate, parameters=X) | dict() | parameters= & must be a Parameters
    searched(parameters=X) | dict() | parameters= & must be a Parameters
    variants(MODEL, CLUSTER, ["dp8"], parameters=X, **BATCH) | dict() | parameters=
    step(jitter=X) | "x"; None; [1]; -1; 1e30 | jitter= & must be 0 to 1,000
    step(door=mm.simulate, collectives=X) | []; "x"; dict(); 3 | collectives= & DataFrame
    step(door=mm.simulate, seed=X) | "a"; None; 1.5; -1 | seed= & whole number
    step(fits=X) | 3 | fits=3 must be True or False
    table(foo=X) | 1 | column 'foo' is not a field of Plan
    table(dp=X) | "8"; [8]; pd.Timestamp("2026"); 8j | column 'dp' must hold numbers, but holds
    table(qgz=X) | "False" | column 'qgz' must hold True or False, but holds
    table(sequence_parallel=X) | "False" | column 'sequence_parallel' & True or False
    table(reduce_fp32=X) | 7 | column 'reduce_fp32' must hold True or False, but holds
    table(overlap_dp=X) | "False" | column 'overlap_dp' must hold numbers
    step(pd.DataFrame([[8, 8]], columns=["dp", X])) | "dp" | column 'dp' is given twice
    step(X) | pd.Series({"dp": 8}); np.array([8]); [mm.Plan(dp=8), 3] | plan=
    searched(top=X) | "a"; None; [1]; -1; 1.5; True | top= & must be a whole number
    searched(shard=X) | "a"; None; [1]; -1; 1.5; True | shard= & must be a whole number
    searched(shards=X) | "a"; None; [1]; -1; 1.5; True | shards= & must be a whole number
    searched(shard=X) | 5 | shard=5 is not one of 0 to 0
    searched(objective=X) | "x"; 3; [] | objective= & is not one of time, cost
    searched(usd_per_hour=X, objective="cost") | "a"; -1; [1]; NAN; 0 | usd_per_hour
    searched(space=X) | 3; "quick"; dict(); Space.quick | space= & must be a Space
    searched(client=X) | 3 | client=3 must be an executor with submit
    searched(X) | None | model=None
    held(model=X) | None | model=None
    mm.model(X) | None | model=None
    mm.Plan(dp=8).check(X, None) | None | model=None
    searched(cluster=X) | None | cluster=
    mm.cluster(X) | None; 3 | cluster=
    mm.largest_model(X, "ddp") | None | cluster=
    mm.planner.codesign(MODEL, X, 64) | 5 | cluster=
    searched(batch=X) | None | global_batch=
    held(global_batch=X) | "a"; 1.5 | global_batch=
    mm.planner.lever_table(MODEL, CLUSTER, PLAN, global_batch=X) | None | global_batch=
    mm.Plan(dp=8).micro_batches(X) | None; "a" | global_batch=
    Space(zero=X) | (4,) | Space: zero= & is not one of
    Space(schedule=X) | "fast" | Space: schedule= & is not one of
    Space(recompute=X) | ("x",) | Space: recompute= & is not one of
    Space(attention=X) | 3 | Space: attention= & is not one of
    Space(context=X) | (1,) | Space: context= & is not one of
    Space(sequence_parallel=X) | ("x",) | Space: sequence_parallel= & is not one of
    Space(overlap_gather=X) | None | Space: overlap_gather= & is not one of
    Space(reduce_fp32=X) | ("yes",) | Space: reduce_fp32= & is not one of
    Space(tp=X) | () | tp=() leaves nothing
    Space(quantised=X) | "yes" | must be True or False
    Space(tp_beyond_node=X) | 1 | must be True or False
    Transformer("t", **SMALL, gated=X) | "no" | must be True or False
    replace(LINK, in_network_reduction=X) | 2 | must be True or False
    mm.Plan(zero=X) | 7 | zero=7 is not one of
    mm.Plan(recompute=X) | True | recompute= & is not one of
    mm.Plan(schedule=X) | [] | schedule= & is not one of
    mm.Plan(offload=X) | "x" | offload= & is not one of
    mm.Plan(overlap_tp=X) | "yes" | overlap_tp= & is not one of
    mm.Plan(qwz=X) | "yes" | qwz= & is not one of
    mm.Plan(sequence_parallel=X) | "no" | sequence_parallel= & is not one of
    mm.Plan(context=X) | None | context= & is not one of
    mm.Plan(overlap_gather=X) | [] | overlap_gather= & is not one of
    mm.Plan(reduce_fp32=X) | 2 | reduce_fp32= & is not one of
    mm.Plan(attention=X) | dict() | attention= & is not one of
    held(optimizer=X) | ["adam"] | optimizer= & is not one of
    step(optimizer=X) | "lamb"; None | optimizer= & is not one of
    mm.Plan(bucket_bytes=X) | None; -1; "25" | bucket_bytes= & must be
    mm.Plan(capacity=X) | NAN; "all" | capacity= & must be
    mm.cluster(CLUSTER, X) | 2.5; 0; -1; "2"; [2]; NAN; INF | dgx-a100: nodes=
    mm.cluster(CLUSTER, devices=X) | 0; 12; "8"; 2.5; True | dgx-a100: devices=
    held(trainable=X) | "a"; 2; None; NAN | trainable= & must be a share
    held(sequence=X) | "8k"; -1 | sequence= & must be a whole number
    held(X) | "pp100" | exceeds
    held(X) | "tp7"; "cp3" | does not divide
    held(X) | "dp2.ep2" | has no experts
    held(X, global_batch=8) | "dp3" | is not a multiple
    held(X) | "dp8.z1.offload-all" | offload=all & needs zero=3 & zero=1
    held("dp8.z3.offload-all", dtype=X) | "fp32" | offload=all is modelled for 16-bit training
    Policy(share=X) | "a"; NAN | share=
    Policy(gradient_bytes=X) | "a" | gradient_bytes=
    Parameters(compute_efficiency=X) | "a" | compute_efficiency=
    Parameters(constants=X) | 3 | constants
    Parameters(constants={"x": X}) | "1" | constant 'x'
    mm.largest_model(CLUSTER, X) | "x"; [] | method=
    usable_bytes(X) | "h100" | device='h100' must be a Device
    variants(MODEL, CLUSTER, X, **BATCH) | None | plans=None
    mm.planner.training(X, 1e9, CLUSTER) | 3 | table=3
    mm.planner.training(X, 1e9, CLUSTER) | TABLE | table of plans
    mm.planner.training(TABLE, X, CLUSTER) | "1T"; -1 | tokens=
    mm.planner.codesign(MODEL, CLUSTER, 64, X) | None | factors=None
    mm.planner.codesign(MODEL, CLUSTER, 64, X) | [-1] | factor=
    mm.traces.step_summary(X) | "DIR" | table=
    mm.traces.step_summary(X) | TABLE | not a table of traces.steps
    mm.breakdown(X) | None; "DIR" | timeline= & must be a Timeline
    mm.compare(X, "B") | "A"; 3 | a= & must be a Timeline
""",
    literal=False,
)
DEGREES = ["tp", "cp", "pp", "ep", "micro_batch", "interleave", "hybrid", "prefetch"]
COUNTS = ["dp", "tp", "pp", "micro_batch", "shard", "lora_rank", "prefetch"]
CALLS += [
    (
        f"Space({name}=X)",
        '"2"; (-1,); (1.5,); [None]; (True,)',
        f"Space: {name}= & whole",
    )
    for name in DEGREES
]
CALLS += [
    (f"mm.Plan({name}=X)", '"2"; -1; 1.5; None; True; [2]', f"{name}= & whole number")
    for name in COUNTS
]


@pytest.mark.parametrize(("call", "values", "words"), CALLS)
def test_wrong_calls(call, values, words):
    for value in values.split("; "):
        names = globals() | {"X": eval(value)}
        check_refused(partial(eval, call, names), words)


FIELDS = {
    Transformer("t", **SMALL): {
        "layers": ["2", None, -1, 0, 1.5, INF, NAN, True, [2]], "hidden": [64.5, -4], "heads": [NAN, 0], "ffn": [-4],
        "sequence": [-1, 1.5], "vocab": [-1], "kv_heads": [-1, 3, 1.5], "head_dim": [-1, INF], "experts": [-1, 1.5],
        "active_experts": [-1], "shared_experts": [-1], "expert_ffn": [-1], "dense_layers": [-1, 5], "window": [-1],
        "moe_every": [-1, 1.5],
        "full_every": [-1], "q_lora_rank": [-1], "v_head_dim": [-1], "classes": [-1], "image": [-1], "patch": [-1],
        "gated": ["no", 2], "norm": [None, [], "batch"], "name": [3, None],
    },
    mm.cluster(CLUSTER).device: {
        "memory_bytes": [INF, NAN, "80GB", None, 0, -1], "memory_bandwidth_bytes_per_s": [INF, 0],
        "tdp_w": [-1, "x", INF], "usd_per_hour": [-1], "sms": [-1, 1.5], "l2_bytes": [-1],
        "scale_up_bytes_per_s": [-1, INF], "family": [3],
        "peak_flops": [[], None, 3e14, {}, {"bf16": -1}, {"bf16": INF}, {"bf16": NAN}, {"bf16": "1"}, {"bf17": 1e12}],
    },
    mm.cluster(CLUSTER).inter: {"bandwidth_bytes_per_s": [NAN, INF, 0, "a", None], "latency_s": [NAN, INF, -1, "a"]},
    mm.cluster(CLUSTER): {
        "device": [None, "h100"], "nodes": ["2", NAN, INF, True, 0, 1.5], "devices_per_node": [[8], 0], "intra": [None],
        "inter": [5, "ib"], "host": [3], "oversubscription": ["a", INF, NAN, 0.5], "nics_per_node": ["a", 0],
        "leaf_devices": [1.5, 12],
    },
    mm.cluster(CLUSTER).host: {"memory_bytes": ["a"], "uplinks": [-1], "nvme_bytes": [-1], "tdp_w": [-1]},
    mm.model("dlrm-a"): {"tables": [0, 1.5, "a", INF], "top_layers": [-1], "experts": [-1]},
}  # fmt: skip


@pytest.mark.parametrize(
    ("item", "field"),
    [(item, field) for item, fields in FIELDS.items() for field in fields],
    ids=lambda part: part if isinstance(part, str) else type(part).__name__,
)
def test_fields_of_specs_hold_what_is_possible(item, field):
    for value in FIELDS[item][field]:
        with pytest.raises(ValueError) as caught:
            replace(item, **{field: value})
        said = str(caught.value)
        assert "\n" not in said and len(said) < 330
        heads = f"{item.name}: {field}", f"{item.name}: heads", "dtype='bf17'"
        assert said.startswith("name=" if field == "name" else heads)


SAME = cells("""
    dtype="bfloat16"
    dtype="torch.bfloat16"
    sequence=None
    sequence=1024.0
    global_batch=np.int64(64)
    global_batch=64.0
    plan=mm.Plan(dp=np.int64(8), zero=1)
    plan="dp8 z1"
    plan="dp=8, zero=1"
    plan=" DP8.ZERO1 "
""")


@pytest.mark.parametrize(("argument",), SAME)
def test_spellings_that_are_taken(argument):
    assert eval(f"step({argument})").equals(step())


def test_spellings_of_clusters_spaces_and_plans():
    two = mm.cluster(CLUSTER, 2)
    assert two == mm.cluster(CLUSTER, nodes=2) == replace(two, nodes=2.0)
    assert type(replace(two, nodes=2.0).nodes) is int
    assert mm.cluster(mm.cluster(CLUSTER)).name == CLUSTER
    brief = Space(tp=8, recompute="full", zero=[1, 3])
    assert brief == Space(tp=(8,), recompute=("full",), zero=(1, 3))
    assert variants(MODEL, CLUSTER, PLAN, **BATCH).index.tolist() == [PLAN]
    both = step([PLAN, mm.Plan(dp=8)])["step_s"].tolist()
    assert both == [step(plan)["step_s"][0] for plan in (PLAN, "dp8")]
    assert require_int("nodes", np.float32(2)) == 2
    assert "\n" not in short_repr(pd.DataFrame({"a": range(9)}))


CHOICES = {"zero": (0, 1, 2, 3), "micro_batch": (1, 2, 4), "recompute": ("none", "selective", "full"),
           "schedule": ("1f1b", "gpipe", "zero-bubble"), "shard": (0, 8), "lora_rank": (0, 0, 16),
           "first_layers": (0, 7), "head_as_layer": (False, True), "reduce_fp32": (False, True)}  # fmt: skip
LAYOUTS = [{"dp": 16}, {"dp": 2, "tp": 8}, {"dp": 4, "pp": 4}, {"dp": 8, "pp": 2}]


@pytest.mark.parametrize("software", [None, "torchtitan", "nanotron"])
def test_a_table_says_which_plans_fit(software):
    """As `fits` and `memory` say it of each plan alone."""
    draw = random.Random(5)
    run = {"model": "llama2-7b", "cluster": mm.cluster("dgx-a100", 2)}
    run["software"] = software
    room = usable_bytes(run["cluster"].device)

    def drawn():
        choices = {name: draw.choice(values) for name, values in CHOICES.items()}
        return choices | draw.choice(LAYOUTS)

    rows = [drawn() for _ in range(400)]
    answers = set()
    table = step(pd.DataFrame(rows), **run).itertuples()
    for row, fields in zip(table, rows, strict=True):
        try:
            alone = step(mm.Plan(**fields), door=mm.fits, **run)
        except ValueError:
            assert np.isnan(row.step_s) and not row.fits
            continue
        assert row.fits == alone.fits and np.isfinite(row.step_s)
        held = room - alone.margins_bytes["device"]
        assert row.memory_bytes == pytest.approx(held, rel=1e-9)
        answers.add(row.fits)
    assert answers == {True, False}


def test_memory_is_counted_unless_it_is_much_work():
    one = step("dp8", "llama3-70b", global_batch=8)
    assert not one["fits"][0] and one["memory_bytes"][0] > 1e12
    many = pd.DataFrame({"dp": np.full(100_001, 8)})
    assert "fits" not in step(fits=False) and "fits" not in step(many)
    assert step(many, fits=True)["fits"].all()
    plans = ["dp8.z2.offload-optimizer", "dp8.z2", "dp8.z1.offload-all", "dp4"]
    offload = step(plans, "llama2-7b", global_batch=8)
    assert offload["fits"].tolist() == [True, True, False, False]
    assert offload["memory_bytes"].isna().tolist() == [True, False, True, True]
    first, second, zero, fills = offload["reason"]
    assert first == second == "" and "needs zero=3" in zero and "fill" in fills


def test_six_devices_and_a_mixture():
    """Shards of three devices beside groups of two experts cannot be laid out."""
    six = replace(mm.cluster("dgx-h100"), devices_per_node=6)
    degrees = Degrees(tp=1, cp=1, pp=1, ep=2, dp=6)
    case = Case("deepseek-v2-lite", six, mm.Plan(), 12)
    assert set(sharding_choices(Space(), degrees, case)["shard"].ravel()) == {0, 2}
    space = Space(ep=2, tp=1, cp=1, zero=3)
    found = searched("deepseek-v2-lite", six, 12, space=space, top=500).table
    assert set(found["shard"]) <= {0, 2} and found["ep"].eq(2).all()


LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100,
         "intermediate_size": 128}  # fmt: skip


@pytest.fixture
def configured(tmp_path):
    """Reads the configuration with changes."""

    def read(**change):
        path = tmp_path / "mine.json"
        path.write_text(json.dumps(LLAMA | change))
        return mm.model(path)

    return read


LENGTH = "max_position_embeddings"


@pytest.mark.parametrize(
    ("length", "more", "sequence", "window"),
    cells("""
    4096 | {} | 4096 | 0
    131072 | {} | 0 | 0
    131072 | {"rope_scaling": {"original_max_position_embeddings": 8192}} | 8192 | 0
    131072 | {"original_max_position_embeddings": 4096} | 4096 | 0
    32768 | {"model_type": "mistral", "sliding_window": 4096} | 32768 | 4096
    32768 | {"model_type": "mistral", "sliding_window": None} | 32768 | 0
    """),
)
def test_the_sequence_of_a_configuration_is_that_of_the_training(
    configured, length, more, sequence, window
):
    model = configured(**{LENGTH: length}, **more)
    assert (model.sequence, model.window) == (sequence, window)
    if not sequence:
        check_refused(partial(step, model=model), "no sequence of its own & sequence=")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("decoder_sparse_step", 2),
        ("mlp_only_layers", [0]),
        ("use_sliding_window", True),
    ],
)
def test_layers_of_several_kinds_are_not_read_as_one(configured, key, value):
    assert configured(**{LENGTH: 4096, "mlp_only_layers": []}).name == "mine"
    change = {LENGTH: 4096, key: value}
    check_refused(partial(configured, **change), f"{key}= & layers of several kinds")


def test_adapters_of_a_higher_rank_take_longer():
    low, middle, high = (
        step(f"dp8.z3.lora{rank}", "llama2-7b", global_batch=8).iloc[0]
        for rank in (8, 64, 512)
    )
    assert low["step_s"] < middle["step_s"] < high["step_s"]
    # per sample, forward and twice backward
    products = 2 * 4096 * (512 - 64) * 32 * (2 * 4096 + 4 * 4096) * 3
    longer_s = high["gemm_s"] - middle["gemm_s"]
    assert products / 312e12 < longer_s < 2 * products / 312e12


def test_every_part_of_a_plan_is_in_its_help():
    parts = [*(f"{name}N" for name in _NUMBERS), *_WORDS, "zpp"]
    assert not [part for part in parts if part not in mm.Plan.__doc__]


WRONG = [None, "", "x", -1, 0, 1, 2, 3, 8, 64, 1.5, 1e30, 10**30, NAN, INF, -INF, True, [], [8], {}, (), object(), b"a",
         np.int64(8), np.array([8, 4]), pd.DataFrame(), pd.DataFrame({"dp": [8, 3]}), "dp8", "gpt2", "dgx-a100", "h100",
         mm.Plan(dp=8), Space.quick(), Parameters(), Policy(), DLRM, Transformer("t", **SMALL), "bf16", "fp8", "nemo",
         "dp2.tp4", "pp8.gpipe", "dp8.z3.offload-all", "measured", mm.model("dlrm-a"), {"dp": 8}, 2**62]  # fmt: skip
RIGHT = {"model": "gpt2", "cluster": "dgx-a100", "plan": "dp8.z1", "global_batch": 64}
FURTHER = ["sequence", "dtype", "software", "imbalance"]
OF_ESTIMATE = ["parameters", "policy", "jitter", "fits"]
DOORS = "estimate fits memory estimate Plan Transformer Space cluster"
KINDS = {"Plan": mm.Plan, "Space": Space, "Transformer": Transformer}


@pytest.mark.parametrize("seed", range(6))
def test_random_wrong_calls_end_in_a_result_or_a_line(seed):
    """3,000 combinations in all: arguments of which one to three are drawn."""
    draw = random.Random(seed)
    for _ in range(500):
        call = drawn_call(draw, draw.choice(DOORS.split()))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                call()
        except (ValueError, OSError) as error:
            assert "\n" not in str(error), error


def drawn_call(draw, door):
    """A call of a door whose arguments are right but for one to three."""
    if door == "cluster":
        name, nodes = draw.choice(["dgx-a100", *WRONG]), draw.choice(WRONG)
        return partial(mm.cluster, name, nodes, draw.choice([None, *WRONG]))
    if door in KINDS:
        right = {"name": "t"} | SMALL if door == "Transformer" else {}
        call, names = KINDS[door], list(KINDS[door].__dataclass_fields__)
        places = []
    else:
        right = {n: v for n, v in RIGHT.items() if door != "memory" or n != "cluster"}
        *places, _ = right
        call = getattr(mm, door)
        names = [*right, *FURTHER] + OF_ESTIMATE * (door == "estimate")
    drawn = draw.sample(names, draw.randint(1, 3))
    asked = right | {name: draw.choice(WRONG) for name in drawn}
    return partial(call, *(asked.pop(name) for name in places), **asked)
