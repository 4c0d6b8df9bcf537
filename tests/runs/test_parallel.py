"""Every layout against one process: losses and gradient norms of three steps,
collectives, checkpoints.
"""

import contextlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from oracles.op_table import ops
from support import cells, refused
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from madmax_lib.plan.plan import Plan
from madmax_lib.runs.model import models
from madmax_lib.runs.parallel import mesh
from madmax_lib.runs.parallel.optimizers import LossScale
from madmax_lib.runs.parallel.trainer import parallelize
from madmax_lib.runs.settings import Settings

pytestmark = pytest.mark.slow

BATCH, SEQUENCE, LAYERS = 8, 16, 4  # as in runs_worker
GPT2 = {"layers": LAYERS, "hidden": 64, "heads": 8, "ffn": 128}
GPT2 |= {"vocab": 264, "sequence": 32}
# label: (model, sizes); 263 rows of a token table are divided by no tp
MODELS = {
    "gpt2": ("gpt2-large", GPT2),
    "gpt2-odd": ("gpt2-large", GPT2 | {"vocab": 263}),
    "gpt": ("gpt-tiny", {}),
    "moe": ("moe-tiny", {}),
    "vit": ("vit-tiny", {}),
}


# One start runs them all, each on the ranks it needs: model, plans, options. The first
# with check=counts, others with a plan that takes up a checkpoint after two steps: the
# same or another. Of those with offload the first has a short last micro-batch; in the
# second row of experts two ranks share each, and its last two are 5D. The head of
# "gpt2 pp2 lora" is the token table, which is frozen.
MATRIX = """
gpt2 | dp2.mb4 dp2.z1.mb4 dp2.z2.mb2 dp2.z3.mb2 dp4.z3.hs2.mb1 | {"check": "counts"}
gpt2 | tp2.nosp.mb8 tp2.mb4 pp2.mb2 cp2.mb8 | {"check": "counts"}
gpt2 | dp2.z3.mb3 dp2.z3.offload-all.mb4 | {}
gpt2 | pp2.gpipe.mb2 pp2.v2.mb2 pp2.zb.mb2 dp2.pp2.zb.mb2 pp2.layout-1+3.mb2 | {}
gpt2 | dp2.pp2.z3.mb2 dp2.tp2.mb4 dp2.tp2.pp2.mb2 | {}
gpt | pp2.v2.zb.mb2 pp2.v2.zbv.mb2 pp2.v2.dualpipev.mb2 dp2.pp2.v2.zbv.mb1 | {}
gpt | dp2.pp2.v2.z2.dualpipev.mb1 pp2.v2.zbv.mb4 | {}
gpt2-odd | tp2.mb8 dp2.tp2.z3.mb4 tp2.nosp.pp2.mb4 | {}
gpt | dp2.z3.mb4.full.unfused cp2.tp2.mb8 | {}
gpt | dp2.z3.mb4 | {"check": "dp2.z3.mb4"}
gpt | dp2.z1.mb4 | {"check": "dp2.z1.mb4"}
gpt | dp2.tp2.z1.mb4 | {"check": "dp4.z3.mb2"}
gpt | tp2.mb8 | {"check": "dp2.z2.mb4"}
gpt2 | dp2.z3.mb4 | {"check": "pp2.mb4"}
gpt2 | pp2.mb4 | {"check": "tp2.nosp.mb8"}
moe | dp2.ep2.mb4 | {"check": "counts"}
moe | dp4.ep2.z3.mb2 | {"check": "dp4.ep2.z3.mb2"}
moe | dp2.cp2.ep4.mb4 dp4.ep2.mb2 dp2.tp2.ep2.z1.mb4 | {}
moe | dp2.tp2.pp2.cp1.ep2.mb2 dp2.tp2.pp2.cp1.ep2.z3.mb2 | {}
vit | dp2.z2.mb2.selective tp2.nosp.mb8 dp2.pp2.mb2 | {}
vit | dp2.mb4 dp2.z3.mb4 | {"lora_rank": 4}
gpt2 | pp2.mb4 | {"lora_rank": 4}
"""
MIXED = """
gpt2 | dp2.mb4 tp2.mb8 | {"dtype": "bf16"}
gpt2 | dp2.z2.mb4 | {"dtype": "fp16"}
gpt | dp2.pp2.z3.mb2 | {"dtype": "bf16"}
gpt2 | dp2.z3.mb4 | {"dtype": "bf16", "weights_16bit": True}
moe | dp2.pp2.mb2 | {"dtype": "bf16", "weights_16bit": True}
"""
MATRIX, MIXED = (
    [(name, plan, of) for name, plans, of in cells(text) for plan in plans.split()]
    for text in (MATRIX, MIXED)
)
OVERFLOW = ("gpt2", "dp2.z2.mb4", {"dtype": "fp16", "first_scale": 2.0**60})


def case_name(model, plan, options):
    return " ".join([model, plan, *(f"{k}={value}" for k, value in options.items())])


def reference(model, options):
    """Name and options of the case of one process."""
    options = {key: value for key, value in options.items() if key == "lora_rank"}
    return case_name(model, "one process", options), options


class Rows(dict):  # what rank 0 saw of every case, by its name
    def __missing__(self, name):
        pytest.skip(f"needs more GPUs than the {torch.cuda.device_count()} here")


@pytest.fixture(scope="module")
def rows(request, tmp_path_factory):
    """One start for all cases."""
    jobs, device = {}, request.config.getoption("--device")
    for model, plan, options in [*MATRIX, *MIXED, OVERFLOW]:
        name, sizes = MODELS[model]
        alone, alone_options = reference(model, options)
        jobs[alone] = [alone, name, f"dp1.mb{BATCH}", alone_options | {"sizes": sizes}]
        case = case_name(model, plan, options)
        jobs[case] = [case, name, plan, options | {"sizes": sizes}]
    ranks = torch.cuda.device_count() if device == "cuda" else 8
    jobs = [case for case in jobs.values() if Plan.parse(case[2]).world_size <= ranks]
    if not jobs:
        pytest.skip("no CUDA device here")
    folder = tmp_path_factory.mktemp("parallel")
    worker = Path(__file__).with_name("runs_worker.py")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    arguments = [str(worker), str(folder / "rows.json"), json.dumps(jobs), device]
    command = [sys.executable, "-W", "ignore", *arguments]
    how = {"capture_output": True, "text": True, "timeout": 600, "cwd": Path.cwd()}
    run = subprocess.run(command, env=environment, **how)
    assert run.returncode == 0, run.stderr[-5000:]
    return Rows(json.loads((folder / "rows.json").read_text()))


@pytest.mark.parametrize(("model", "plan", "options"), MATRIX, ids=str)
def test_losses_and_gradients_are_those_of_one_process(rows, model, plan, options):
    row = rows[case_name(model, plan, options)]
    alone = rows[reference(model, options)[0]]
    assert row["loss"] == pytest.approx(alone["loss"], abs=1e-4)
    assert row["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-4)
    assert row["evaluated"] == pytest.approx(alone["evaluated"], abs=1e-4)
    assert row["accuracy"] == pytest.approx(alone["accuracy"], abs=1.01 / row["tokens"])
    assert row["steps_done"] == 3 and not any(row["overflow"])


def test_the_reference_learns_something_at_each_step(rows):
    """Were the updates small, any layout would agree. Of GPT-2 with adapters the head
    is frozen too.
    """
    for name, row in rows.items():
        if "one process" in name:
            norms, losses = row["grad_norm"], row["loss"]
            assert len({round(norm, 3) for norm in norms}) == 3
            assert min(norms) > (0.05 if name.startswith("gpt2 one process l") else 0.5)
            assert max(losses) - min(losses) > 1e-3


@pytest.mark.parametrize(("model", "plan", "options"), MIXED, ids=str)
def test_mixed_precision_is_near(rows, model, plan, options):
    row = rows[case_name(model, plan, options)]
    alone = rows[reference(model, options)[0]]
    assert row["loss"] == pytest.approx(alone["loss"], abs=5e-3)
    assert row["grad_norm"] == pytest.approx(alone["grad_norm"], rel=3e-2)
    assert row["loss"] != alone["loss"]


def test_steps_whose_gradient_overflows_change_nothing(rows):
    row, alone = rows[case_name(*OVERFLOW)], rows["gpt2 one process"]
    assert row["overflow"] == [True] * 3 and row["grad_norm"] == [math.inf] * 3
    assert row["loss_scale"] == [2.0**60, 2.0**59, 2.0**58]
    assert row["loss"][0] == pytest.approx(alone["loss"][0], abs=5e-3)
    assert abs(row["loss"][2] - alone["loss"][2]) > 0.01  # nothing was learned


COUNTS = {"check": "counts"}
COUNTED = [plan for model, plan, of in MATRIX if (model, of) == ("gpt2", COUNTS)]


def collectives(plan):
    """Collectives of a step in closed form: {kind: (calls, bytes)} of the GPT-2 case,
    fp32.

    Two all-reduces of scalars (loss, right and counted targets; norm) belong to every
    step.
    """
    spec, m = models.spec("gpt2-large", **GPT2), plan.micro_batches(BATCH)
    whole = 4 * spec.parameters
    width = 4 * spec.hidden
    activation = plan.micro_batch * SEQUENCE // plan.cp * width
    logits = plan.micro_batch * SEQUENCE * spec.vocab * 4
    passes = m * (4 * LAYERS + 2)
    scalars = 32
    if plan.pp > 1:
        # to the next stage and back; both hold the token table and swap its gradients
        sent = (m + 1, m * activation + spec.vocab * width)
        return {"send": sent, "recv": sent, "all_reduce": (2, scalars)}
    if plan.cp > 1:  # queries, keys and values there in one, the result back
        exchanged = 4 * m * LAYERS, 2 * m * LAYERS * 4 * activation
        return {"all_to_all": exchanged, "all_reduce": (3, whole + scalars)}
    if plan.tp > 1 and not plan.sequence_parallel:
        reduced = passes + 2, passes * activation + scalars
        return {"all_reduce": reduced, "all_gather": (m, m * logits)}
    if plan.tp > 1:
        norms = 2 * (2 * LAYERS + 1)  # weights and biases, each with a gradient to sum
        summed = (norms + spec.sequence) * width + scalars
        return {
            "reduce_scatter": (passes, passes * activation),
            "all_gather": (passes + m, passes * activation + m * logits),
            "all_reduce": (3, summed),
        }
    if plan.zero < 2:
        once = {"broadcast": (plan.dp, whole)} if plan.zero else {}
        return {"all_reduce": (3, whole + scalars)} | once
    layers = whole - 4 * (spec.embedding_parameters + spec.norm_parameters)
    units = LAYERS + 1
    gathers = (units, whole)
    if plan.zero == 3:
        gathers = (m * (2 * LAYERS + 1), m * (whole + layers))
    copies = (units, whole // plan.shard) if 0 < plan.shard < plan.dp else (0, 0)
    return {
        "all_gather": gathers,
        "reduce_scatter": (m * units, m * whole),
        "all_reduce": (2 + copies[0], scalars + copies[1]),
    }


@pytest.mark.parametrize("plan", COUNTED)
def test_collectives_are_those_of_the_formulas(rows, plan):
    row = rows[case_name("gpt2", plan, COUNTS)]
    made = {kind: (calls, row["sizes"][kind]) for kind, calls in row["calls"].items()}
    assert made == collectives(Plan.parse(plan))


@pytest.mark.parametrize("text", ["tp2.nosp.mb8", "tp2.mb4"])
def test_tensor_parallel_traffic_is_that_of_the_simulator(rows, text):
    """The run also gathers its logits, and sums gradients and scalars once."""
    row, plan = rows[case_name("gpt2", text, COUNTS)], Plan.parse(text)
    spec, m = models.spec("gpt2-large", **GPT2), plan.micro_batches(BATCH)
    logits = 4 * BATCH * SEQUENCE * spec.vocab
    beside = {"all_gather": (m, logits), "all_reduce": (2, 32)}
    table = ops(spec, plan, SEQUENCE, "fp32").query("group == 'tp'")
    for kind, sizes in table.groupby("collective")["size_bytes"]:
        calls, size_bytes = beside.get(kind, (0, 0))
        assert row["calls"][kind] == calls + m * len(sizes)
        assert row["sizes"][kind] == size_bytes + m * sizes.sum()


def test_experts_exchange_counts_rows_and_results(rows):
    row = rows["moe dp2.ep2.mb4 check=counts"]
    assert row["calls"]["all_to_all"] == 4 * LAYERS + LAYERS


@pytest.mark.parametrize(
    ("model", "plan", "options", "key", "value"),
    cells("""
    moe | dp2.tp2.pp2.cp1.ep2.z3.mb2 | {} | data_parallel | fsdp2
    gpt2 | dp2.mb4 | {"check": "counts"} | data_parallel | ddp
    gpt2 | dp2.tp2.mb4 | {} | data_parallel | replicate
    gpt2 | dp4.z3.hs2.mb1 | {"check": "counts"} | data_parallel | hsdp
    gpt2 | pp2.mb2 | {"check": "counts"} | data_parallel | none
    gpt2 | dp2.z1.mb4 | {"check": "counts"} | optimizer | AdamW
    gpt2 | cp2.mb8 | {"check": "counts"} | context | ulysses
    vit | dp2.mb4 | {"lora_rank": 4} | trained_local_parameters | 10596
    gpt2 | pp2.gpipe.mb2 | {} | schedule | ScheduleGPipe
    gpt2 | pp2.mb2 | {"check": "counts"} | schedule | Schedule1F1B
    gpt2 | pp2.v2.mb2 | {} | schedule | ScheduleInterleaved1F1B
    gpt2 | pp2.zb.mb2 | {} | schedule | ScheduleInterleavedZeroBubble
    """),
)
def test_a_job_describes_itself(rows, model, plan, options, key, value):
    """Adapters of four layers and a head of 100 classes: 65 x 100 + 4 x 2 x 4 x (64 +
    64) parameters.
    """
    assert rows[case_name(model, plan, options)]["describe"][key] == value


@pytest.mark.parametrize(
    ("plan", "shards"),
    [("dp2.z3.mb2", 2), ("dp4.z3.hs2.mb1", 2), ("dp2.z1.mb4", 1), ("tp2.mb4", 2)],
)
def test_shards_hold_their_share(rows, plan, shards):
    """Norms are on every tp rank."""
    job = rows[case_name("gpt2", plan, COUNTS)]["describe"]
    share = job["parameters"] / shards
    assert job["local_parameters"] == pytest.approx(share, rel=0.03)


def test_a_plan_needs_its_ranks():
    with refused("dp2 needs 2 ranks & 1 were started"):
        mesh.build(Plan(dp=2), "cpu")


@pytest.fixture
def mesh_of_1024():
    """That of rank 300, in a group that only pretends."""
    plan = Plan.parse("dp16.tp8.pp2.cp4.ep32")
    pretended = {"store": FakeStore(), "rank": 300, "world_size": plan.world_size}
    dist.init_process_group("fake", **pretended)
    yield mesh.build(plan, "cpu")
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("name", "size", "coordinate"),
    cells("""
    pp | 2 | 0
    dp | 16 | 9
    cp | 4 | 1
    tp | 8 | 4
    ep | 32 | 5
    edp | 2 | 1
    fsdp | 64 | 37
    """),
)
def test_dimensions_of_many_ranks(mesh_of_1024, name, size, coordinate):
    """tp is the fastest, pp the slowest."""
    assert mesh_of_1024.size(name) == size
    assert mesh_of_1024.coordinate(name) == coordinate


def test_the_loss_scale_falls_at_once_and_rises_slowly():
    scale = LossScale(8.0, dynamic=True, growth_interval=3)
    values = []
    for overflow in (True, False, False, True, False, False, False, False):
        scale.update(overflow)
        values.append(scale.value)
    assert values == [4, 4, 4, 2, 2, 2, 4, 4]


class Names(TorchDispatchMode, list):  # of the operators that run inside
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.append(function.__name__)
        return function(*args, **(kwargs or {}))


WAITS = ("_local_scalar_dense", "nonzero", "bincount")


def test_the_host_waits_for_no_value_before_the_update(monkeypatch):
    """Loss and accuracy, after the update, are two items."""
    settings = Settings(global_batch=2, sequence=8)
    job = parallelize("moe-tiny", Plan(micro_batch=2), settings)
    monkeypatch.setattr(torch.Tensor, "tolist", torch.Tensor.item)
    batch = dict.fromkeys(("tokens", "targets"), torch.arange(16).view(2, 8))
    with contextlib.suppress(RuntimeError), Names() as names:
        job.step(batch)
    before = names[: names.index("_fused_adamw_.default")]
    assert not [name for name in before if name.startswith(WAITS)]
