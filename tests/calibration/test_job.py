"""The job of a trace is the one that made it, and its own plan takes what was measured.

What the trainer knows of itself judges the reading; the reading does not see it.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from support import local_or_skip, make_timeline

from madmax_lib.__main__ import main
from madmax_lib.calibration.job.another_plan import another_plan, case_of
from madmax_lib.calibration.job.shapes import shapes_of
from madmax_lib.calibration.trace import fit_timeline, kernel_seconds
from madmax_lib.catalog.datasets import PROJECT
from madmax_lib.plan.plan import Plan
from madmax_lib.timeline.accounting import breakdown
from madmax_lib.traces.read.kineto import read_trace

# folder: plan, then layers, hidden, heads, ffn, vocabulary, tokens, batch
RECORDED = {
    "gpt-ddp": ("dp2.mb8", 4, 128, 4, 512, 512, 64, 16),
    "gpt-fsdp": ("dp2.z3.mb8", 4, 128, 4, 512, 512, 64, 16),
    "vit-ddp": ("dp2.mb8", 4, 128, 4, 512, 0, 65, 16),
    "vit-fsdp": ("dp2.z3.mb8", 4, 128, 4, 512, 0, 65, 16),
    "gpt-z2-1gbit": ("dp2.z2.mb4", 4, 256, 8, 768, 264, 128, 8),
    "vit-h100": ("dp1.mb64", 32, 1280, 16, 5120, 0, 257, 64),
}


def recorded(name):
    return read_trace(PROJECT / "traces" / name)


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_job_is_read_off_its_trace(name):
    case = case_of(recorded(name)).case
    model = case.model
    sizes = (model.layers, model.hidden, model.heads, model.ffn, model.vocab)
    about = (str(case.plan), *sizes, model.sequence, case.global_batch)
    assert about == RECORDED[name]
    assert case.dtype == ("bf16" if name == "vit-h100" else "fp32")


def test_the_reading_says_why_and_is_a_call():
    job = case_of(recorded("gpt-fsdp"))
    facts = job.facts.set_index("field")
    assert facts.at["zero", "value"] == 3 and "gathers" in facts.at["zero", "evidence"]
    assert set(facts["sure"]) <= {"certain", "likely", "guess"}
    assert "Plan.parse('dp2.z3.mb8'), 16, 64, 'fp32', 'workbench')" in repr(job)


@pytest.mark.parametrize(("talks", "sure"), [(True, "certain"), (False, "guess")])
def test_ranks_that_exchange_nothing_may_be_jobs_of_their_own(talks, sure):
    timeline = recorded("gpt-ddp")
    spans = timeline.spans
    is_comm = spans["name"].str.contains("c10d|gloo") | (spans["kind"] == "comm")
    facts = case_of(timeline.where(talks | ~is_comm)).facts.set_index("field")
    assert (facts.at["dp", "value"], facts.at["dp", "sure"]) == (2, sure)
    assert ("zero" in facts.index) == talks
    assert ("independent" in facts.at["dp", "evidence"]) != talks


# hidden, heads, kv heads, kv heads that attention shows, rank of adapters
WIDTHS = [
    (128, 8, 2, 8, 0),
    (4096, 32, 8, 32, 0),
    (128, 8, 4, 8, 0),
    (256, 8, 8, 8, 0),
    (4096, 32, 8, 32, 16),
    (4096, 32, 8, 8, 16),
    (256, 8, 8, 8, 32),
]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(("hidden", "heads", "kv", "shown", "adapter"), WIDTHS)
def test_narrow_products_are_of_keys_or_of_adapters(
    hidden, heads, kv, shown, adapter, recompute
):
    """A Llama of two layers, with frozen weights where q and v have adapters."""
    width, rows, ffn = hidden // heads, 512, 3 * hidden
    weights = [(hidden, n) for n in (hidden, hidden, kv * width, kv * width)]
    weights += [(hidden, ffn), (hidden, ffn), (ffn, hidden)]
    more = [(hidden, adapter), (adapter, hidden)] * 2 if adapter else []
    more[3:] = [(adapter, kv * width)] * bool(adapter)
    products = [(rows, *w) for w in weights + more] * (1 + (recompute == "full"))
    products += [(rows, n, k) for k, n in weights + more]
    products += [(n, rows, k) for k, n in more or weights]
    names = ["batch", "heads", "kv_heads", "tokens", "head_dim"]
    sizes = dict(zip(names, (4, heads, shown, 128, width), strict=True))
    passes = [False, True] if recompute == "none" else [False, False, True]
    attentions = pd.DataFrame([sizes] * 2 * len(passes))
    attentions = attentions.assign(rank=0, backward=passes * 2)
    seen = SimpleNamespace(
        attentions=attentions,
        products=pd.DataFrame(products * 2, columns=["m", "k", "n"]).assign(rank=0),
        routers={"experts": []},
    )
    shapes = shapes_of(seen)
    assert (shapes.kv_heads, shapes.adapter) == (kv, adapter)
    assert (shapes.ffn, shapes.gated, shapes.recompute) == (ffn, True, recompute)


@pytest.mark.parametrize(
    ("path", "group", "kinds", "dtype"),
    [
        ("param-dlrm-8xV100", 8, "all_reduce, all_to_all", "fp32"),
        ("more/torchrec-a2a5", 4, "all_reduce, all_to_all", "fp32"),
        ("hta-samples/nccl_data.json.gz", 2, "all_reduce, broadcast", "tf32"),
    ],
)
def test_other_jobs_tell_groups_and_type(path, group, kinds, dtype):
    job = case_of(read_trace(local_or_skip("traces") / path))
    facts = job.facts.set_index("field")["value"]
    assert job.case is None and facts["dp"] == group and facts["dtype"] == dtype
    assert facts[f"group of {group}"] == kinds


@pytest.mark.parametrize("name", ["gpt-ddp", "vit-fsdp", "vit-h100"])
def test_its_own_plan_takes_what_was_measured(name):
    timeline = recorded(name)
    answer = another_plan(timeline, RECORDED[name][0])
    measured_s = kernel_seconds(timeline)["step_s"]
    assert answer.step_s == pytest.approx(measured_s, rel=0.03)
    assert answer.low_s < measured_s < answer.high_s
    assert answer.kinds["new_s"].sum() == pytest.approx(answer.step_s)
    assert breakdown(answer.timeline)["total_s"].max() == pytest.approx(
        answer.step_s, rel=0.01
    )
    assert answer.timeline.meta.source == "simulated"


@pytest.mark.parametrize(
    ("name", "other"), [("gpt-ddp", "gpt-fsdp"), ("vit-ddp", "vit-fsdp")]
)
def test_the_other_plan_is_foretold(name, other):
    """ZeRO-3 from a trace of DDP, by the run that was recorded beside it."""
    answer = another_plan(recorded(name), RECORDED[other][0])
    measured_s = kernel_seconds(recorded(other))["step_s"]
    assert answer.step_s == pytest.approx(measured_s, rel=0.15)
    assert answer.low_s < measured_s < answer.high_s
    kinds = answer.kinds["rests_on"]
    assert kinds["gemm_s"] == "trace" and kinds["fsdp_s"] == "simulator"


@pytest.mark.parametrize(
    ("text", "plan", "batch"),
    [
        ("tp2", "tp2.mb16", 16),
        ("pp2", "pp2.mb8", 16),
        ("dp4.z3", "dp4.z3.mb8", 32),
        ("pp2.mb2", "pp2.mb2", 16),
    ],
)
def test_a_plan_that_says_no_micro_batch_keeps_their_number(text, plan, batch):
    answer = another_plan(recorded("gpt-ddp"), text, global_batch=batch)
    assert answer.case.plan == Plan.parse(plan)


def test_more_processes_on_a_cpu_are_taken_to_have_cores():
    said = "assuming that each has its own cores"
    assert said in repr(another_plan(recorded("gpt-ddp"), "dp4", global_batch=32))
    assert said not in repr(another_plan(recorded("gpt-ddp"), "tp2"))


def test_what_both_ends_sum_over_tp_is_no_pointwise_work():
    """Gloo over a slow link: pointwise work takes what was measured, and not the time
    of the sums over it that the embedding and the loss wait for."""
    kinds = another_plan(recorded("gpt-z2-1gbit"), "tp2").kinds
    pointwise = kinds.loc["pointwise_s"]
    assert pointwise["new_s"] == pytest.approx(pointwise["measured_s"], rel=0.1)
    assert kinds.loc["tp_s", "new_s"] > 5 * pointwise["new_s"]


def test_what_was_not_measured_widens_the_interval():
    timeline = recorded("vit-h100")

    def width(plan, **options):
        answer = another_plan(timeline, plan, **options)
        return np.log(answer.high_s / answer.low_s)

    near = width("dp1.mb64"), width("dp8.mb64", global_batch=512)
    assert near[0] < near[1] < width("tp2.mb64")


def test_what_the_fit_cannot_meet_is_said():
    notes = " ".join(another_plan(recorded("vit-h100"), "dp1.mb64").notes)
    assert "gemm is off by +" in notes and "is at its bound" in notes
    # of a CPU too the notes are of the fit in the table, whose constants have no bounds
    answer = another_plan(recorded("gpt-ddp"), "dp2.mb8")
    parts = answer.kinds.loc["pointwise_s"]
    error = parts["simulated_s"] / parts["measured_s"] - 1
    said = f"pointwise is off by {error:+.0%}: no constant can match it"
    assert answer.notes == (said,)
    case = case_of(recorded("gpt-ddp")).case
    larger = replace(case, global_batch=32, plan=Plan.parse("dp2.mb16"))
    cluster = another_plan(recorded("gpt-ddp"), "dp2.mb8").machine.cluster
    with pytest.raises(ValueError, match="forward passes only"):
        fit_timeline(
            recorded("gpt-ddp"), replace(larger, global_batch=48, cluster=cluster)
        )
    # a part that the model of the plan lacks is left out
    adapted = replace(case, plan=Plan.parse("dp2.mb8.lora8"), cluster=cluster)
    errors = fit_timeline(recorded("gpt-ddp"), adapted).provenance["errors"][0]
    assert errors["optimizer_s"] == -1 and abs(errors["step_s"]) < 0.5
    with pytest.raises(ValueError, match="not a step of a transformer"):
        another_plan(make_timeline([(0, 1, "compute", "gemm", 0, 9)]), "dp1")


def test_the_shell_reads_a_trace_and_writes_a_machine(tmp_path):
    trace = PROJECT / "traces" / "gpt-ddp"
    words = ["calibrate", "--trace", trace, "--to", "dp2.z3.mb8", "-o", tmp_path]
    command = [sys.executable, "-m", "madmax_lib", *map(str, words)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "Plan.parse('dp2.mb8')" in run.stdout and "dp2.z3.mb8: 0.0" in run.stdout
    assert (tmp_path / "machine.json").exists()


def test_json_is_json_also_of_a_job_that_nobody_can_tell(tmp_path, capsys):
    for name, status in (("gpt-ddp", 0), ("dlrm-8xv100", 3)):
        trace = str(PROJECT / "traces" / name)
        words = ["calibrate", "--trace", trace, "-o", str(tmp_path), "--json"]
        assert main(words) == status
        answer = json.loads(capsys.readouterr().out)
    assert answer["status"] == 3 and answer["summary"]["verdict"] == "cannot tell"


# Layouts whose traces the trainer writes here: model, plan
LAYOUTS = """
gpt2 dp2.tp2.mb4
gpt2 dp2.pp2.z3.mb2
gpt2 pp2.v2.mb2
gpt2 pp2.zb.mb2
gpt dp2.z3.mb4.full.unfused
gpt cp2.tp2.mb8
moe dp2.tp2.ep2.z1.mb4
vit dp2.z2.mb2.selective
gpt2 dp4.z3.hs2.mb1
"""
LAYOUTS = [line.split() for line in LAYOUTS.strip().splitlines()]


@pytest.fixture(scope="module")
def layouts(tmp_path_factory):
    """Folder of traces of the layouts, one start for all."""
    folder = tmp_path_factory.mktemp("layouts")
    worker = Path(__file__).with_name("job_worker.py")
    words = [sys.executable, "-W", "ignore", worker, folder, json.dumps(LAYOUTS)]
    tests = str(Path(__file__).parents[1])
    paths = [os.environ.get("PYTHONPATH", ""), tests, f"{tests}/runs"]
    limits = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    how = {"env": os.environ | limits | {"PYTHONPATH": os.pathsep.join(paths)}}
    run = subprocess.run([*map(str, words)], capture_output=True, text=True, **how)
    assert run.returncode == 0, run.stderr[-3000:]
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("model", "plan"), LAYOUTS)
def test_the_plan_of_a_layout_is_read_off_its_trace(layouts, model, plan):
    case = case_of(read_trace(layouts / f"{model}-{plan}")).case
    expected = Plan.parse(plan)
    if expected.cp > 1:
        expected = replace(expected, context="ulysses")
    assert case.plan == expected and case.global_batch == 8


def test_larger_groups_than_the_traced_one_are_not_cheaper():
    """Priced by formulas alone four ranks were cheaper than the two that were timed."""
    timeline = recorded("gpt-ddp")
    answers = [
        another_plan(timeline, f"dp{n}.mb8", global_batch=8 * n) for n in (2, 4, 8)
    ]
    comm_s = [answer.kinds["new_s"]["dp_s"] for answer in answers]
    assert comm_s == sorted(comm_s) and comm_s[2] > 1.5 * comm_s[0]
