"""What a wrong call is told: one line that names the argument and its value; and the
spellings that are taken.
"""

import json
import random
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import madmax_lib as mm
from madmax_lib.base.fields import require_int, short_repr
from madmax_lib.catalog.models import DLRM, Transformer
from madmax_lib.plan.case import Case
from madmax_lib.planner import Space, codesign, lever_table, training, variants
from madmax_lib.planner.space import Degrees, sharding_choices
from madmax_lib.simulator import Parameters, Policy, moments, usable_bytes

MODEL, CLUSTER, PLAN, BATCH = "gpt2", "dgx-a100", "dp8.z1", {"global_batch": 64}
NAN, INF = float("nan"), float("inf")
TABLE = pd.DataFrame({"dp": [8], "step_s": [1.0]})
SMALL = {
    "layers": 2,
    "hidden": 64,
    "heads": 4,
    "ffn": 256,
    "sequence": 128,
    "vocab": 100,
}
STEPS = {"estimate": mm.estimate, "simulate": mm.simulate, "fits": mm.fits}


def timed(**change):
    return mm.estimate(MODEL, CLUSTER, PLAN, **BATCH | change)


def searched(*names, **change):
    options = {"space": Space.quick(), "progress": False}
    return mm.search(*(names or (MODEL, CLUSTER, 64)), **options | change)


def laid(plan):
    return mm.estimate(MODEL, CLUSTER, plan, **BATCH)


def held(*names, **change):
    return mm.memory(*(names or (MODEL, PLAN)), **change)


def table(**columns):
    return laid(
        pd.DataFrame({"dp": [8]} | {name: [value] for name, value in columns.items()})
    )


# of every call that takes a step
ARGUMENTS = [
    (
        "global_batch",
        [None, 0, -8, 64.5, NAN, INF, "64", [64], True, {}],
        "^global_batch=",
    ),
    ("sequence", ["8k", 0, -1, 1.5, [1024], NAN, INF, {}, True], "^sequence="),
    (
        "dtype",
        [16, None, "bf17", ["bf16"], float],
        r"^dtype=.* is not one of fp64, fp32",
    ),
    (
        "dtype",
        ["nvfp4", "fp8", "int4"],
        "^(a100-80 does not compute in|dtype='int4' is not)",
    ),
    (
        "software",
        [3, ["nemo"], {}, "nosuch"],
        "software.*(must be a Software or the name|'nosuch'; nearest)",
    ),
    (
        "imbalance",
        ["x", None, [1], 0.5, 1e30, NAN, INF],
        "^imbalance=.* must be 1 to 1,000",
    ),
    ("policy", [3, {}, "x"], "^policy=.* must be a Policy"),
]
NAMES = [
    (
        0,
        [None, 5, [MODEL], {}, b"gpt2", Transformer],
        "^model=.* must be a Model or the name of one",
    ),
    (
        0,
        ["", " ", "gpt9", "gpt-tiny"],
        r"^unknown model .*; nearest: .* are mm.RunSpec\(model=...\).shapes$",
    ),
    (
        1,
        [5, [CLUSTER], {}, mm.model("gpt2")],
        "^cluster=.* must be a Cluster or the name of one",
    ),
    (1, [None], "^cluster=None: a step needs a cluster"),
    (1, ["", "dgx"], "^unknown cluster .*; nearest: "),
    (
        2,
        [None, 3.5, {"dp": 8}, 8],
        "^plan=.* must be a Plan or its text, such as dp2.tp2.z3",
    ),
    (
        2,
        ["dp8/tp2", "8", "dp-8", "dp8.0", "tensor8", "dp٣"],
        "^'.*' in plan '.*' is not one of dpN.*dp2.tp8.z1.full",
    ),
    (2, ["dp8.dp8"], "^dp is given twice in plan 'dp8.dp8'"),
    (2, ["dp4"], "but dgx-a100 has 8 devices"),
    (2, ["dp8.offload-all"], "^offload=all needs zero=3, but zero=0$"),
    (
        2,
        ["dp8.mb16"],
        "^micro_batch=16 exceeds the 8 samples .* each of dp=8; nearest: micro_batch=8$",
    ),
    (2, ["dp8.lora4096"], "^lora_rank=4096 exceeds the 768 channels of gpt2"),
    (2, ["dp8.z3.no-overlap-dp"], "^overlap_dp=False is for zero below 3"),
]


@pytest.mark.parametrize("door", STEPS)
@pytest.mark.parametrize(
    ("name", "values", "words"), [*ARGUMENTS, *NAMES], ids=lambda part: str(part)[:24]
)
def test_wrong_arguments_of_a_step(door, name, values, words):
    for value in values:
        names, options = [MODEL, CLUSTER, PLAN], dict(BATCH)
        if isinstance(name, str):
            options[name] = value
        else:
            names[name] = value
        refused(lambda: STEPS[door](*names, **options), words)  # noqa: B023


CALLS = {
    "^parameters=.* must be a Parameters": [
        *(lambda value=value: timed(parameters=value) for value in (3, {}, [], 0, "shipped")),
        lambda: mm.simulate(MODEL, CLUSTER, PLAN, parameters={}, **BATCH),
        lambda: searched(parameters={}),
        lambda: variants(MODEL, CLUSTER, ["dp8"], parameters={}, **BATCH),
    ],
    "^jitter=.* must be 0 to 1,000": [lambda value=value: timed(jitter=value) for value in ("x", None, [1], -1, 1e30)],
    "^collectives=.* must be a DataFrame": [
        lambda value=value: mm.simulate(MODEL, CLUSTER, PLAN, collectives=value, **BATCH) for value in ([], "x", {}, 3)
    ],
    "^seed=.* must be a whole number": [
        lambda value=value: mm.simulate(MODEL, CLUSTER, PLAN, seed=value, **BATCH) for value in ("a", None, 1.5, -1)
    ],
    "^fits=3 must be True or False": [lambda: timed(fits=3)],
    "column 'foo' is not a field of Plan": [lambda: table(foo=1)],
    "^column 'dp' must hold numbers, but holds": [
        lambda value=value: table(dp=value) for value in ("8", [8], pd.Timestamp("2026"), 8j)],
    "^column '(qgz|sequence_parallel|reduce_fp32)' must hold True or False, but holds": [
        lambda: table(qgz="False"), lambda: table(sequence_parallel="False"), lambda: table(reduce_fp32=7)],
    "^column 'overlap_dp' must hold numbers": [lambda: table(overlap_dp="False")],
    "^column 'dp' is given twice": [lambda: laid(pd.DataFrame([[8, 8]], columns=["dp", "dp"]))],
    "^plan=": [lambda: laid(pd.Series({"dp": 8})), lambda: laid(np.array([8])), lambda: laid([mm.Plan(dp=8), 3])],
    "^(top|shard|shards)=.* must be a whole number": [
        lambda name=name, value=value: searched(**{name: value})
        for name in ("top", "shard", "shards") for value in ("a", None, [1], -1, 1.5, True)],
    "^shard=5 is not one of 0 to 0": [lambda: searched(shard=5)],
    "^objective=.* is not one of time, cost": [lambda value=value: searched(objective=value) for value in ("x", 3, [])],
    "usd_per_hour|needs a price": [
        lambda value=value: searched(usd_per_hour=value, objective="cost") for value in ("a", -1, [1], NAN, 0)],
    "^space=.* must be a Space": [lambda value=value: searched(space=value) for value in (3, "quick", {}, Space.quick)],
    "^client=3 must be a dask client": [lambda: searched(client=3)],
    "^directory=3 must be text or a Path": [lambda: searched(directory=3)],
    "^model=None": [lambda: searched(None, CLUSTER, 64), lambda: held(None, PLAN), lambda: mm.model(None),
                    lambda: mm.Plan(dp=8).check(None, None)],
    "^cluster=": [lambda: searched(MODEL, None, 64), lambda: mm.cluster(None), lambda: mm.cluster(3),
                  lambda: mm.largest_model(None, "ddp"), lambda: codesign(MODEL, 5, 64)],
    "^global_batch=": [lambda: searched(MODEL, CLUSTER, None), lambda: held(global_batch="a"),
                       lambda: held(global_batch=1.5), lambda: lever_table(MODEL, CLUSTER, PLAN, global_batch=None),
                       lambda: mm.Plan(dp=8).micro_batches(None), lambda: mm.Plan(dp=8).micro_batches("a")],
    "^Space: (tp|cp|pp|ep|micro_batch|interleave|hybrid|prefetch)=.* must be a whole "
        "number": [
        lambda name=name, value=value: Space(**{name: value})
        for name in ("tp", "cp", "pp", "ep", "micro_batch", "interleave", "hybrid", "prefetch")
        for value in ("2", (-1,), (1.5,), [None], (True,))],
    "^Space: .* is not one of": [
        lambda: Space(zero=(4,)), lambda: Space(schedule="fast"), lambda: Space(recompute=("x",)),
        lambda: Space(attention=3), lambda: Space(context=(1,)), lambda: Space(sequence_parallel=("x",)),
        lambda: Space(overlap_gather=None), lambda: Space(reduce_fp32=("yes",))],
    r"^tp=\(\) leaves nothing": [lambda: Space(tp=())],
    "must be True or False": [
        lambda: Space(quantised="yes"), lambda: Space(tp_beyond_node=1), lambda: held(fused_loss="no"),
        lambda: Transformer("t", **SMALL, gated="no"),
        lambda: replace(mm.cluster(CLUSTER).inter, in_network_reduction=2)],
    "^(dp|tp|pp|micro_batch|shard|lora_rank|prefetch)=.* must be a whole number": [
        lambda name=name, value=value: mm.Plan(**{name: value})
        for name in ("dp", "tp", "pp", "micro_batch", "shard", "lora_rank", "prefetch")
        for value in ("2", -1, 1.5, None, True, [2])],
    "^[a-z_0-9]+=.* is not one of": [
        lambda: mm.Plan(zero=7), lambda: mm.Plan(recompute=True), lambda: mm.Plan(schedule=[]),
        lambda: mm.Plan(offload="x"), lambda: mm.Plan(overlap_tp="yes"), lambda: mm.Plan(qwz="yes"),
        lambda: mm.Plan(sequence_parallel="no"), lambda: mm.Plan(context=None), lambda: mm.Plan(overlap_gather=[]),
        lambda: mm.Plan(reduce_fp32=2), lambda: mm.Plan(attention={}), lambda: held(optimizer=["adam"])],
    "^(bucket_bytes|capacity)=.* must be": [
        lambda: mm.Plan(bucket_bytes=None), lambda: mm.Plan(bucket_bytes=-1), lambda: mm.Plan(bucket_bytes="25"),
        lambda: mm.Plan(capacity=NAN), lambda: mm.Plan(capacity="all")],
    "^dgx-a100: (nodes|devices)=": [
        *(lambda value=value: mm.cluster(CLUSTER, value) for value in (2.5, 0, -1, "2", [2], NAN, INF)),
        *(lambda value=value: mm.cluster(CLUSTER, devices=value) for value in (0, 12, "8", 2.5, True))],
    "^trainable=.* must be a share": [lambda value=value: held(trainable=value) for value in ("a", 2, None, NAN)],
    "^sequence=.* must be a whole number": [lambda: held(sequence="8k"), lambda: held(sequence=-1)],
    "(does not divide|exceeds|has no experts|is not a multiple)": [
        lambda: held(MODEL, "pp100"), lambda: held(MODEL, "tp7"), lambda: held(MODEL, "dp2.ep2"),
        lambda: held(MODEL, "dp3", global_batch=8), lambda: held(MODEL, "cp3")],
    "^offload=all (needs zero=3, but zero=1|is modelled for 16-bit training)": [
        lambda: held(MODEL, "dp8.z1.offload-all"), lambda: held(MODEL, "dp8.z3.offload-all", dtype="fp32")],
    "^(share|gradient_bytes|compute_efficiency|constants|constant 'x')": [
        lambda: Policy(share="a"), lambda: Policy(share=NAN), lambda: Policy(gradient_bytes="a"),
        lambda: Parameters(compute_efficiency="a"), lambda: Parameters(constants=3),
        lambda: Parameters(constants={"x": "1"})],
    "^method=": [lambda: mm.largest_model(CLUSTER, "x"), lambda: mm.largest_model(CLUSTER, [])],
    "^device='h100' must be a Device": [lambda: usable_bytes("h100")],
    "^moments are those of an offloaded step": [lambda: moments(MODEL, CLUSTER, "dp8", **BATCH)],
    "^plans=None": [lambda: variants(MODEL, CLUSTER, None, **BATCH)],
    "^table=3|^table of plans|^tokens=": [
        lambda: training(3, 1e9, CLUSTER), lambda: training(TABLE, 1e9, CLUSTER),
        lambda: training(TABLE, "1T", CLUSTER), lambda: training(TABLE, -1, CLUSTER)],
    "^factors=None|factor=": [lambda: codesign(MODEL, CLUSTER, 64, None), lambda: codesign(MODEL, CLUSTER, 64, [-1])],
    "^table=|^the table is none of traces.steps": [
        lambda: mm.traces.step_summary("DIR"), lambda: mm.traces.step_summary(TABLE)],
    "^(timeline|a)=.* must be a Timeline": [
        lambda: mm.breakdown(None), lambda: mm.breakdown("DIR"), lambda: mm.compare("A", "B"),
        lambda: mm.compare(3, 4)],
}  # fmt: skip


@pytest.mark.parametrize(
    ("words", "calls"), CALLS.items(), ids=[words[:30] for words in CALLS]
)
def test_wrong_calls(words, calls):
    for call in calls:
        refused(call, words)


def refused(call, words):
    with warnings.catch_warnings(), pytest.raises(ValueError, match=words) as told:
        warnings.simplefilter("error")
        call()
    assert "\n" not in str(told.value) and len(str(told.value)) < 330


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


@pytest.mark.parametrize("item", FIELDS, ids=lambda item: type(item).__name__)
def test_fields_of_specs_hold_what_is_possible(item):
    for field, values in FIELDS[item].items():
        for value in values:
            words = (
                "^name=" if field == "name" else f"^{item.name}: (heads|{field})[= ]"
            )
            refused(lambda: replace(item, **{field: value}), f"{words}|dtype='bf17'")  # noqa: B023
    assert replace(mm.cluster(CLUSTER), nodes=2.0).nodes.__class__ is int


def test_spellings_that_are_taken():
    usual = timed()
    same = [
        timed(dtype="bfloat16"),
        timed(dtype="torch.bfloat16"),
        timed(sequence=None),
        timed(sequence=1024.0),
        timed(global_batch=np.int64(64)),
        timed(global_batch=64.0),
        laid(mm.Plan(dp=np.int64(8), zero=1)),
        *(laid(text) for text in ("dp8 z1", "dp=8, zero=1", " DP8.ZERO1 ")),
    ]
    assert all(table.equals(usual) for table in same)
    assert (
        mm.cluster(CLUSTER, 2) == mm.cluster(CLUSTER, nodes=2)
        and mm.cluster(mm.cluster(CLUSTER)).name == CLUSTER
    )
    assert Space(tp=8, recompute="full", zero=[1, 3]) == Space(
        tp=(8,), recompute=("full",), zero=(1, 3)
    )
    assert variants(MODEL, CLUSTER, PLAN, **BATCH).index.tolist() == [PLAN]
    assert laid([PLAN, mm.Plan(dp=8)])["step_s"].tolist() == [
        laid(PLAN)["step_s"][0],
        laid("dp8")["step_s"][0],
    ]
    assert require_int("nodes", np.float32(2)) == 2 and "\n" not in short_repr(
        pd.DataFrame({"a": range(9)})
    )


@pytest.mark.parametrize("software", [None, "torchtitan", "nanotron"])
def test_a_table_says_which_plans_fit(software):
    """As `fits` and `memory` say it of each plan alone."""
    draw, cluster = random.Random(5), mm.cluster("dgx-a100", 2)
    choices = {"zero": (0, 1, 2, 3), "micro_batch": (1, 2, 4), "recompute": ("none", "selective", "full"),
               "schedule": ("1f1b", "gpipe", "zero-bubble"), "shard": (0, 8), "lora_rank": (0, 0, 16),
               "first_layers": (0, 7), "head_as_layer": (False, True), "reduce_fp32": (False, True)}  # fmt: skip
    rows = [
        {name: draw.choice(values) for name, values in choices.items()}
        for _ in range(400)
    ]
    rows = [
        row
        | draw.choice(
            [{"dp": 16}, {"dp": 2, "tp": 8}, {"dp": 4, "pp": 4}, {"dp": 8, "pp": 2}]
        )
        for row in rows
    ]
    table = mm.estimate(
        "llama2-7b", cluster, pd.DataFrame(rows), global_batch=64, software=software
    )
    told = set()
    for row, fields in zip(table.itertuples(), rows, strict=True):
        try:
            alone = mm.fits(
                "llama2-7b",
                cluster,
                mm.Plan(**fields),
                global_batch=64,
                software=software,
            )
        except ValueError:
            assert np.isnan(row.step_s) and not row.fits
            continue
        assert row.fits == alone.fits and np.isfinite(row.step_s)
        assert row.memory_bytes == pytest.approx(
            usable_bytes(cluster.device) - alone.margins_bytes["device"], rel=1e-9
        )
        told.add(row.fits)
    assert told == {True, False}


def test_memory_is_counted_unless_it_is_much_work():
    one = mm.estimate("llama3-70b", "dgx-a100", "dp8", global_batch=8)
    assert not one["fits"][0] and one["memory_bytes"][0] > 1e12
    assert "fits" not in mm.estimate(MODEL, CLUSTER, PLAN, fits=False, **BATCH)
    many = pd.DataFrame({"dp": np.full(100_001, 8)})
    assert "fits" not in mm.estimate(MODEL, CLUSTER, many, **BATCH)
    assert mm.estimate(MODEL, CLUSTER, many, fits=True, **BATCH)["fits"].all()
    plans = ["dp8.z2.offload-optimizer", "dp8.z2", "dp8.z1.offload-all", "dp4"]
    offload = mm.estimate("llama2-7b", CLUSTER, plans, global_batch=8)
    assert offload["fits"].tolist() == [True, True, False, False]
    assert offload["memory_bytes"].isna().tolist() == [True, False, True, True]
    fills, zero = (
        "dp x tp x pp x cp must fill the cluster",
        "offload=all needs zero=3, but zero=1",
    )
    assert offload["reason"].tolist() == ["", "", zero, fills]


def test_six_devices_and_a_mixture():
    """Shards of three devices beside groups of two experts cannot be laid out."""
    six = replace(mm.cluster("dgx-h100"), devices_per_node=6)
    choices = sharding_choices(
        Space(),
        Degrees(tp=1, cp=1, pp=1, ep=2, dp=6),
        Case("deepseek-v2-lite", six, mm.Plan(), 12),
    )
    assert set(choices["shard"].ravel()) == {0, 2}
    found = mm.search(
        "deepseek-v2-lite",
        six,
        12,
        space=Space(ep=2, tp=1, cp=1, zero=3),
        top=500,
        progress=False,
    )
    assert set(found.table["shard"]) <= {0, 2} and found.table["ep"].eq(2).all()


LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100,
         "intermediate_size": 128}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "sequence", "window"),
    [
        ({"max_position_embeddings": 4096}, 4096, 0),
        ({"max_position_embeddings": 131072}, 0, 0),
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {"original_max_position_embeddings": 8192},
            },
            8192,
            0,
        ),
        (
            {
                "max_position_embeddings": 131072,
                "original_max_position_embeddings": 4096,
            },
            4096,
            0,
        ),
        (
            {
                "model_type": "mistral",
                "max_position_embeddings": 32768,
                "sliding_window": 4096,
            },
            32768,
            4096,
        ),
        (
            {
                "model_type": "mistral",
                "max_position_embeddings": 32768,
                "sliding_window": None,
            },
            32768,
            0,
        ),
    ],
)
def test_the_sequence_of_a_configuration_is_that_of_the_training(
    tmp_path: Path, change, sequence, window
):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | change))
    model = mm.model(path)
    assert (model.sequence, model.window) == (sequence, window)
    if not sequence:
        refused(
            lambda: mm.estimate(model, CLUSTER, "dp8", global_batch=8),
            "has no sequence of its own; give sequence=",
        )


def test_adapters_of_a_higher_rank_take_longer():
    steps = [
        mm.estimate("llama2-7b", CLUSTER, f"dp8.z3.lora{rank}", global_batch=8)
        for rank in (8, 64, 512)
    ]
    assert steps[0]["step_s"][0] < steps[1]["step_s"][0] < steps[2]["step_s"][0]
    products = (
        2 * 4096 * (512 - 64) * 32 * (2 * 4096 + 4 * 4096) * 3
    )  # per sample, forward and twice backward
    longer = steps[2]["gemm_s"][0] - steps[1]["gemm_s"][0]
    assert products / 312e12 < longer < 2 * products / 312e12


def test_every_part_of_a_plan_is_in_its_help():
    from madmax_lib.plan.plan import _NUMBERS, _WORDS

    missing = [
        part
        for part in [*(f"{name}N" for name in _NUMBERS), *_WORDS, "zpp"]
        if part not in mm.Plan.__doc__
    ]
    assert not missing


WRONG = [None, "", "x", -1, 0, 1, 2, 3, 8, 64, 1.5, 1e30, 10**30, NAN, INF, -INF, True, [], [8], {}, (), object(), b"a",
         np.int64(8), np.array([8, 4]), pd.DataFrame(), pd.DataFrame({"dp": [8, 3]}), "dp8", "gpt2", "dgx-a100", "h100",
         mm.Plan(dp=8), Space.quick(), Parameters(), Policy(), DLRM, Transformer("t", **SMALL), "bf16", "fp8", "nemo",
         "dp2.tp4", "pp8.gpipe", "dp8.z3.offload-all", "measured", mm.model("dlrm-a"), {"dp": 8}, 2**62]  # fmt: skip
RIGHT = {"model": "gpt2", "cluster": "dgx-a100", "plan": "dp8.z1", "global_batch": 64}
FURTHER = ["sequence", "dtype", "software", "imbalance"]


@pytest.mark.parametrize("seed", range(6))
def test_random_wrong_calls_end_in_a_result_or_a_line(seed):
    """3,000 combinations in all: arguments of which one to three are drawn."""
    draw = random.Random(seed)
    for _ in range(500):
        door = draw.choice(
            [
                "estimate",
                "fits",
                "memory",
                "estimate",
                "Plan",
                "Transformer",
                "Space",
                "cluster",
            ]
        )
        call = drawn_call(draw, door)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                call()
        except (ValueError, OSError) as error:
            assert "\n" not in str(error), error


def drawn_call(draw, door):
    """A call of a door whose arguments are right but for one to three."""
    count = draw.randint(1, 3)
    if door in ("estimate", "fits", "memory"):
        right = {
            name: value
            for name, value in RIGHT.items()
            if door != "memory" or name != "cluster"
        }
        names = [*right, *FURTHER] + ["parameters", "policy", "jitter", "fits"] * (
            door == "estimate"
        )
        change = {name: draw.choice(WRONG) for name in draw.sample(names, count)}
        call = getattr(mm, door)
        first = [(right | change)[name] for name in right if name != "global_batch"]
        rest = {
            name: value
            for name, value in (right | change).items()
            if name not in list(right)[:-1]
        }
        return lambda: call(*first, **rest)
    if door == "cluster":
        return lambda: mm.cluster(
            draw.choice(["dgx-a100", *WRONG]),
            draw.choice(WRONG),
            draw.choice([None, *WRONG]),
        )
    kind, right = {
        "Plan": (mm.Plan, {}),
        "Transformer": (Transformer, {"name": "t"} | SMALL),
        "Space": (Space, {}),
    }[door]
    fields = draw.sample(list(kind.__dataclass_fields__), count)
    change = {name: draw.choice(WRONG) for name in fields}
    return lambda: kind(**right | change)


@pytest.mark.parametrize(
    "change",
    [
        {"decoder_sparse_step": 2},
        {"mlp_only_layers": [0]},
        {"use_sliding_window": True},
    ],
)
def test_layers_of_several_kinds_are_not_read_as_one(tmp_path: Path, change):
    path = tmp_path / "mine.json"
    path.write_text(
        json.dumps(LLAMA | {"max_position_embeddings": 4096, "mlp_only_layers": []})
    )
    assert mm.model(path).name == "mine"
    path.write_text(json.dumps(LLAMA | {"max_position_embeddings": 4096} | change))
    refused(lambda: mm.model(path), f"{next(iter(change))}=.*layers of several kinds")
