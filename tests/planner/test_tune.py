"""The tuner: closed forms of its beliefs, what failures teach, state files, replays of
a measured sweep, bad input.
"""

import importlib
import json
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
from scipy.special import ndtr
from support import local_or_skip

import madmax_lib as mm
from madmax_lib.planner import Tuner
from madmax_lib.planner.tuner import surrogate
from madmax_lib.planner.tuner.surrogate import Candidates, beliefs

CASE = {"model": "gpt2-large", "cluster": "dgx-a100", "global_batch": 64}
PLANS = [f"dp8.z{zero}.mb{micro}" for zero in range(4) for micro in (1, 2, 4, 8)] + [
    "dp4.tp2",
    "dp2.tp4",
    "dp4.pp2",
]
NONE = np.array([], int)


def candidates(
    log_s=(0.0, 0.1, 5.0), log_room=(1.0, 1.0, 1.0), features=((0.0,), (0.0,), (9.0,))
):
    shares = np.zeros((len(log_s), 1))
    return Candidates(
        np.array(log_s),
        np.array(log_room),
        np.array(features),
        shares,
        shares[:, 0] + 0.3,
    )


def after(plans, *trials, asked=NONE, seed=0):
    """Beliefs after trials (place, log seconds or NaN)."""
    tried, log_s = np.array(trials, float).reshape(-1, 2).T
    return beliefs(plans, tried.astype(int), log_s, np.asarray(asked, int), seed)


def tuner(**changes):
    return Tuner(**(CASE | {"plans": PLANS} | changes))


def test_one_trial_moves_the_mean_in_closed_form():
    """The trial's error is shared out by prior over prior + noise; a neighbour gets all
    of it, a stranger `_ALL`^2.
    """
    plans, error = candidates(), -0.4
    result = after(plans, (0, error))
    shared, near = surrogate._ALL**2, surrogate._NEAR**2
    total = shared + near + surrogate._NOISE**2 + surrogate._OWN**2
    far = shared + near * np.exp(-81 / (2 * surrogate._LENGTH**2))
    covariances = np.array([shared + near, shared + near, far])
    assert result.log_s == pytest.approx(plans.log_s + covariances / total * error)
    assert (result.width / 1.645) ** 2 == pytest.approx(
        shared + near + surrogate._OWN**2 - covariances**2 / total
    )


def test_before_any_trial_the_simulator_is_believed():
    plans = candidates(log_room=(0.0, 2.0, -2.0))
    result = after(plans)
    assert (
        result.log_s == pytest.approx(plans.log_s)
        and np.isnan(result.improvement_s).all()
        and (result.width == 0.3).all()
    )
    width = np.hypot(surrogate._MEMORY, surrogate._UNSURE)
    assert result.runs == pytest.approx(
        (1 - surrogate._CRASH) * ndtr(plans.log_room / width)
    )


def test_expected_improvement_is_that_of_a_random_draw():
    plans = candidates(log_s=(0.0, 0.1, 0.4), features=((0.0,), (1.0,), (5.0,)))
    result = after(plans, (0, -0.1))
    draws = np.exp(
        result.log_s
        + result.width / 1.645 * np.random.default_rng(0).standard_normal((200_000, 3))
    )
    gain = result.runs * np.maximum(np.exp(-0.1) - draws, 0).mean(axis=0)
    assert result.improvement_s == pytest.approx(gain, rel=0.03)


def test_a_slow_trial_weighs_less_than_a_fast_one():
    """Beside a trial as long as the simulator says; a slow trial alone may be a slow
    machine and counts in full.
    """
    plans = candidates()
    usual, slow, fast = (
        after(plans, (2, 5.0), *more).log_s[1] for more in ((), [(0, 1.0)], [(0, -1.0)])
    )
    assert 0 < slow - usual < (usual - fast) / 2
    assert after(plans, (0, 1.0)).log_s[1] - 0.1 == pytest.approx(
        0.1 - after(plans, (0, -1.0)).log_s[1]
    )


@pytest.mark.parametrize("room", [0.0, -0.5, 0.1])
def test_a_plan_out_of_memory_moves_its_neighbours_most(room):
    """And one that runs speaks for them."""
    plans = candidates(log_room=(room,) * 3)
    before, failed, ran = (
        after(plans).runs,
        after(plans, (0, np.nan)).runs,
        after(plans, (0, 0.0)).runs,
    )
    assert failed[1] < failed[2] < before[2] and before[1] < ran[1]
    assert failed[1] == pytest.approx(failed[0])


def test_a_crash_with_much_room_left_says_little_of_memory():
    """It raises the rate of crashes around, and far plans with little room are as
    likely to run as before.
    """
    plans = candidates(log_room=(3.0, 3.0, 0.1))
    before, failed = after(plans).runs, after(plans, (0, np.nan)).runs
    assert failed[1] < 0.7 * before[1] and failed[2] == pytest.approx(
        before[2], rel=0.01
    )


def test_chances_are_chances():
    """On random plans and trials: in 0..1, no gain below 0, tried plans do not win,
    those that break a rule nothing.
    """
    for seed in range(20):
        random = np.random.default_rng(seed)
        size = int(random.integers(2, 60))
        log_s = np.where(random.random(size) < 0.1, np.nan, random.normal(0, 1, size))
        log_s[0] = 0.0
        log_room, features = (
            random.normal(0.3, 0.5, size),
            random.normal(0, 2, (size, 4)),
        )
        plans = Candidates(
            log_s, log_room, features, random.random((size, 3)), np.ones(size)
        )
        tried = random.permutation(np.flatnonzero(np.isfinite(log_s)))[
            : int(random.integers(0, size))
        ]
        told = np.where(
            random.random(len(tried)) < 0.3,
            np.nan,
            log_s[tried] + random.normal(0.2, 0.5, len(tried)),
        )
        result = beliefs(plans, tried, told, NONE, seed)
        legal = np.isfinite(log_s)
        assert np.isfinite(result.log_s[legal]).all() and (result.width > 0).all()
        for chance in (result.runs, result.wins):
            assert ((chance >= 0) & (chance <= 1)).all() and not chance[~legal].any()
        assert not result.wins[tried].any() and not (result.improvement_s < 0).any()


def test_more_plans_than_are_drawn():
    """Slow plans are left out, and not the fastest one because it may not run."""
    size, room = surrogate._MOST + 50, np.ones(surrogate._MOST + 50)
    room[0] = 0.0
    features = np.arange(size)[:, None] / 9.0
    plans = Candidates(
        np.linspace(0, 5, size), room, features, np.zeros((size, 1)), np.ones(size)
    )
    wins = after(plans, (7, 0.3)).wins
    assert wins[0] > wins[9] > 0 and not wins[surrogate._MOST + 1 :].any()


def test_plans_asked_before_a_tell_differ_and_all_come_once():
    one = tuner()
    asked = [str(one.ask()) for _ in range(one.left)]
    legal = one.table.query("reason == ''")["plan"]
    assert sorted(asked) == sorted(legal) and one.left == 0
    with pytest.raises(ValueError, match="the tuning is done"):
        one.ask()


def test_a_plan_being_tried_makes_room_for_others():
    """Of three alike plans, the chance that another wins where one that is being tried
    does not is smaller.
    """
    plans = candidates(log_s=(0.0, 0.0, 0.0))
    assert after(plans, asked=[0]).wins[1] < after(plans).wins[1]


def test_the_same_seed_asks_the_same_plans():
    def asked(seed):
        one, result = tuner(seed=seed), []
        for number in range(6):
            result.append(str(one.ask()))
            one.tell(result[-1], None if number == 1 else 1.0 / (number + 1))
        return result

    assert asked(3) == asked(3)


def test_failures_of_neighbours_are_avoided():
    """Micro-batches of 1 and 2 fit by the simulator's count; 2 fails, and 4 is given up
    rather than 1.
    """
    plans = [f"dp8.z3.mb{micro}" for micro in (1, 2, 4)]
    one = tuner(model="qwen2.5-7b", global_batch=512, plans=plans)
    before = one.table.set_index("plan")["fits"]
    one.tell("dp8.z3.mb2")
    table = one.table.set_index("plan")
    change = table["fits"] / before
    assert (
        change["dp8.z3.mb2"] < change["dp8.z3"] < 1
        and table.at["dp8.z3.mb4", "fits"] < 0.7 * before["dp8.z3.mb4"]
    )
    assert table.at["dp8.z3.mb2", "failures"] == 1 and str(one.ask()) == "dp8.z3"
    with pytest.raises(ValueError, match="no plan has run in 1 trials"):
        one.best  # noqa: B018


def test_an_offload_that_never_fits_is_refused_and_not_asked():
    one = tuner(
        model="gpt3-175b", global_batch=8, plans=["dp8.z3", "dp8.z3.offload-all"]
    )
    reasons = one.table.set_index("plan")["reason"]
    assert (
        reasons["dp8.z3.offload-all"] and one.left == 1 and str(one.ask()) == "dp8.z3"
    )


def test_table_and_trials_say_what_was_told():
    one = tuner(plans=[*PLANS, "dp3"])
    for plan, step_s in [
        ("dp8.mb2", 0.4),
        ("dp8.z1", None),
        ("dp8.mb2", 0.5),
        ("dp8.z3", 0.42),
        ("dp8.z1.mb2", 0.6),
    ]:
        one.tell(plan, step_s)
    table = one.table.set_index("plan")
    assert (
        table.loc["dp8.mb2", "measured_s"] == pytest.approx(0.45)
        and table.loc["dp8.z1", "failures"] == 1
    )
    assert str(one.best) == "dp8.z3" and one.trials["best_s"].tolist() == [
        0.4,
        0.4,
        0.4,
        0.4,
        0.4,
    ]
    assert (
        "24" not in table.loc["dp3", "reason"]
        and "8 devices" in table.loc["dp3", "reason"]
    )
    legal = table[table["reason"] == ""]
    assert (legal["low_s"] < legal["step_s"]).all() and (
        legal["step_s"] < legal["high_s"]
    ).all()
    expected = mm.estimate(**CASE, plan_or_table=list(legal.index))
    assert legal["simulated_s"].tolist() == pytest.approx(expected["step_s"].tolist())
    untried = tuner().table.set_index("plan").loc[legal.index]
    assert untried["high_s"].tolist() == pytest.approx(expected["high_s"].tolist())


def test_a_tuning_goes_on_from_its_file(tmp_path):
    path = tmp_path / "state.json"
    one, whole = tuner(state=path), tuner()
    for step_s in (0.5, None, 0.3):
        plan = one.ask()
        assert plan == whole.ask()
        one.tell(plan, step_s)
        whole.tell(plan, step_s)
    one.ask()  # and is stopped
    again = tuner(state=path)
    pd.testing.assert_frame_equal(again.table, whole.table)
    pd.testing.assert_frame_equal(again.trials, whole.trials)
    assert again.ask() == whole.ask() and again.best == whole.best
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


@pytest.mark.parametrize("plans", [tuple(PLANS), iter(PLANS), dict.fromkeys(PLANS), pd.Series(PLANS), [*PLANS, *PLANS],
                                   pd.DataFrame({"plan": PLANS})], ids=["tuple", "iterator", "dict", "series", "twice",
                                   "table"])  # fmt: skip
def test_plans_come_in_any_form(plans):
    pd.testing.assert_frame_equal(tuner(plans=plans).table, tuner().table)


def test_a_measured_plan_need_not_be_among_the_plans(tmp_path):
    one = tuner(state=tmp_path / "state.json")
    one.tell("dp2.tp2.pp2", 0.01)
    assert (
        str(one.best) == "dp2.tp2.pp2" == str(tuner(state=tmp_path / "state.json").best)
    )


@pytest.mark.parametrize(
    "content",
    ["", '{"told": [', "[]", '{"told": 3, "sha256": ""}', '{"told": [["dp8", "x"]]}'],
)
def test_a_torn_file_is_one_line(tmp_path, content):
    (tmp_path / "state.json").write_text(content)
    with pytest.raises(ValueError, match="is not a tuning state") as caught:
        tuner(state=tmp_path / "state.json")
    assert "\n" not in str(caught.value)


def test_a_file_of_another_case_is_refused(tmp_path):
    tuner(state=tmp_path / "state.json").tell("dp8", 1.0)
    with pytest.raises(ValueError, match="tuning of another case"):
        tuner(state=tmp_path / "state.json", global_batch=128)


WRONG = {
    "a batch of text": ({"global_batch": "64"}, "global_batch='64'"),
    "no batch": ({"global_batch": None}, "global_batch=None"),
    "no plans": ({"plans": []}, "plans: empty"),
    "a word for a plan": ({"plans": ["fast"]}, "'fast' in plan"),
    "plans too large": (
        {"plans": ["dp16", "dp3"]},
        "none can be laid out; the first: .* = 16",
    ),
    "a number for plans": ({"plans": 8}, "plans=8"),
    "a number for software": ({"software": 3}, "software=3"),
    "unknown model": ({"model": "gpt9"}, "gpt9"),
    "a negative seed": ({"seed": -1}, "seed=-1"),
    "parameters of text": ({"parameters": "mine"}, "parameters='mine'"),
    "a number for a file": ({"state": 3}, "state=3"),
    "a recommendation model": ({"model": "dlrm-a", "plans": ["dp8"]}, "recommendation"),
}


@pytest.mark.parametrize("changes, message", WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_one_line(changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        tuner(**changes)
    assert "\n" not in str(caught.value)


TELLS = [
    (0, "dp8"),
    (-1.0, "dp8"),
    ("1", "dp8"),
    (True, "dp8"),
    (float("inf"), "dp8"),
    (1.0, "dp3"),
    (1.0, "quick"),
]


@pytest.mark.parametrize("step_s, plan", TELLS)
def test_a_wrong_tell_is_one_line_and_leaves_nothing(plan, step_s):
    one = tuner()
    with pytest.raises(
        ValueError, match=f"step_s={step_s!r}|= 3, but dgx-a100|'{plan}'"
    ):
        one.tell(plan, step_s)
    assert one.trials.empty and len(one.table) == len(PLANS)


def test_tune_measures_until_there_are_so_many_trials(tmp_path):
    seconds = dict(
        zip(PLANS, np.random.default_rng(0).uniform(0.2, 0.6, len(PLANS)), strict=True)
    )
    seconds |= {str(mm.Plan.parse(text)): value for text, value in seconds.items()}

    def launch(plan):
        if plan.tp > 1:
            raise RuntimeError("out of memory")
        return seconds[str(plan)]

    run = CASE | {
        "plans": PLANS,
        "launch": launch,
        "state": tmp_path / "state.json",
        "progress": False,
    }
    assert len(mm.tune(**run, trials=3).trials) == 3
    known = mm.tune(**run, trials=8).trials
    assert len(known) == 8 and known["plan"].is_unique
    done = mm.tune(**run, trials=100)
    assert (
        done.left == 0
        and len(done.trials) == len(PLANS)
        and done.trials["step_s"].isna().sum() == 2
    )
    assert seconds[str(done.best)] == min(
        seconds[str(mm.Plan.parse(text))] for text in PLANS if "tp" not in text
    )


def test_workers_try_plans_side_by_side(dask_client):
    """Each plan once; a mistake comes back from the worker."""
    run = CASE | {"plans": PLANS, "client": dask_client, "progress": False}
    trials = mm.tune(
        **run,
        launch=lambda plan: 0.3 / plan.micro_batch if plan.zero else None,
        trials=9,
    ).trials
    assert len(trials) == 9 and trials["plan"].is_unique
    failed = [mm.Plan.parse(text).zero == 0 for text in trials["plan"]]
    assert trials["step_s"].isna().tolist() == failed
    with pytest.raises(TypeError):
        mm.tune(**run, launch=lambda: 1.0, trials=2)


def test_runs_are_launched_with_the_micro_batch_of_the_plan(tmp_path, monkeypatch):
    """The median of the steps counts; a run that ran out of memory is a failure. The
    plans are those that can run.
    """
    module, specs = importlib.import_module("madmax_lib.planner.tuner.tune"), []

    def start(spec, directory, check):
        specs.append(spec)
        status = "completed" if len(specs) < 3 else "out-of-memory"
        directory.mkdir(parents=True)
        summary = {"status": status, "step_s": {"median": 0.5 / len(specs)}}
        (directory / "summary.json").write_text(json.dumps(summary))
        return directory

    monkeypatch.setattr(module, "start", start)
    spec = mm.RunSpec("gpt-tiny", strategy="dp2", ranks=2, global_batch=8, device="cpu")
    machine = mm.cluster("dgx-a100", devices=2)
    run = {
        "global_batch": 8,
        "launch": spec,
        "directory": tmp_path,
        "trials": 4,
        "progress": False,
    }
    trials = mm.tune(spec.shapes, machine, **run).trials
    assert [mm.Plan.parse(text) for text in trials["plan"]] == [
        spec.plan for spec in specs
    ]
    assert {spec.plan.world_size for spec in specs} == {2} and all(
        "mb" in spec.strategy for spec in specs
    )
    assert trials["step_s"].fillna(0).tolist() == [0.5, 0.25, 0, 0]


@pytest.mark.parametrize(
    ("launch", "words"),
    [
        (Mock(side_effect=RuntimeError("no such file: pretrain.py")), "no such file"),
        (lambda plan: None, "no seconds"),
    ],
)
def test_trials_that_all_fail_are_said(launch, words):
    run = CASE | {"plans": PLANS, "progress": False}
    with pytest.warns(UserWarning, match=f"no trial ran, the last: {words}"):
        mm.tune(**run, launch=launch, trials=3)


def test_mistakes_of_a_launch_are_not_failures_of_a_plan():
    run = CASE | {"plans": PLANS, "progress": False}
    with pytest.raises(TypeError):
        mm.tune(**run, launch=lambda: 1.0)
    with pytest.raises(ValueError, match="launch=3"):
        mm.tune(**run, launch=3)
    with pytest.raises(ValueError, match="trials=0"):
        mm.tune(**run, launch=str, trials=0)
    with pytest.raises(ValueError, match="directory=None"):
        mm.tune(**run, launch=mm.RunSpec())


def test_replay_of_a_measured_sweep_needs_few_trials():
    """8B on 8 GPUs: the tuner is done in a third of the trials that a random order is
    expected to need.
    """
    rows = pd.read_csv(local_or_skip("published_more/layout_sweep.csv"))
    rows = rows[(rows["model"] == "nanotron-8B") & (rows["n_gpus"] == 8)]
    names = {
        "dp": "dp",
        "tp": "tp",
        "pp": "pp",
        "zero_stage": "zero",
        "micro_batch": "micro_batch",
    }
    plans = [
        mm.Plan(**row)
        for row in rows[list(names)].rename(columns=names).to_dict("records")
    ]
    shape = replace(mm.model("llama3-8b"), kv_heads=32, vocab=131072, ffn=14336)
    seconds = dict(zip(plans, rows["iteration_time_s"], strict=True))
    run = {
        "plans": plans,
        "software": "nanotron",
        "sequence": 4096,
        "launch": seconds.get,
        "trials": 10,
    }
    done = mm.tune(shape, "p5", global_batch=256, progress=False, **run)
    assert done.trials["best_s"].min() <= 1.05 * min(
        value for value in seconds.values() if value > 0
    )


def test_the_state_says_what_it_is_about(tmp_path):
    tuner(state=tmp_path / "state.json").tell("dp8", 1.0)
    state = json.loads((tmp_path / "state.json").read_text())
    assert state["model"] == "gpt2-large" and state["told"] == [["dp8", 1.0]]
