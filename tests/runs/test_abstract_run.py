"""One rank of a job that does not run: counts and bytes against closed forms and against the simulator's workload."""

import warnings

import pytest
from oracles.op_table import ops

pytest.importorskip("torch")

from madmax_lib.plan import Plan
from madmax_lib.runs.model import models

# as in `runs.parallel.data_parallel`
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")


@pytest.fixture(scope="module")
def trace():
    """`abstract_run.trace` with its results kept: many tests look at one trace."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*torch.jit", DeprecationWarning)  # torch's own modules, when first imported
        from oracles import abstract_run

    traces = {}

    def trace_once(model, plan, **options):
        key = (model, plan, repr(sorted(options.items())))
        if key not in traces:
            traces[key] = abstract_run.trace(model, Plan.parse(plan), **options)
        return traces[key]

    return trace_once


def calls(traced, collective, group):
    """(count, bytes) of one kind in one group."""
    rows = traced.collectives
    row = rows[(rows["collective"] == collective) & (rows["group"] == group)]
    return (int(row["count"].iloc[0]), float(row["size_bytes"].iloc[0])) if len(row) else (0, 0.0)


def layer_bytes(spec):
    """fp32 bytes of a layer."""
    return 4 * (models.spec(spec, layers=2).parameters - models.spec(spec, layers=1).parameters)


@pytest.mark.parametrize("layers", [4, 12])
def test_fully_sharded(trace, layers):
    """L layers and the root: gathered twice and, the root, once; scattered once each [arXiv 2304.11277]."""
    spec = models.spec("gpt-tiny", layers=layers)
    traced = trace("gpt-tiny", "dp4.z3", global_batch=4, sizes={"layers": layers})
    whole, inside = 4 * spec.parameters, layers * layer_bytes("gpt-tiny")
    assert calls(traced, "all_gather", "dp") == (2 * layers + 1, whole + inside)
    assert calls(traced, "reduce_scatter", "dp") == (layers + 1, whole)
    assert traced.layers == layers


@pytest.mark.parametrize(("model", "samples"), [("gpt-tiny", 1), ("vit-tiny", 2)])
def test_flops_are_the_closed_form(trace, model, samples):
    """Forward exactly; backward twice, and half of the attention once more where it is fused."""
    plan = f"dp4.mb{samples}.unfused"
    traced, spec = trace(model, plan, global_batch=4 * samples), models.spec(model)
    assert traced.flops["forward"] == spec.forward_flops(samples)
    fused = trace(model, f"dp4.mb{samples}", global_batch=4 * samples)
    scores = 4 * samples * spec.layers * spec.sequence**2 * spec.core_width
    assert fused.flops["forward"] == spec.forward_flops(samples)
    assert fused.flops["backward"] - traced.flops["backward"] == pytest.approx(0.5 * scores)


def test_recompute_repeats_the_layers(trace):
    """But for the last product of each: torch stops once all that the backward pass needs is there."""
    spec = models.spec("gpt-tiny")
    none, full = (trace("gpt-tiny", plan, global_batch=4) for plan in ("dp4.unfused", "dp4.full.unfused"))
    head, down = (2 * spec.sequence * spec.hidden * width for width in (spec.vocab, spec.ffn))
    again = full.flops["backward"] - none.flops["backward"]
    assert again == pytest.approx(spec.forward_flops(1) - head - spec.layers * down)


def test_copies_reduce_all_gradients_once(trace):
    _, size = calls(trace("gpt-tiny", "dp4", global_batch=8), "all_reduce", "dp")
    assert size == pytest.approx(4 * models.spec("gpt-tiny").parameters, abs=64)  # and the sums for loss and norm


@pytest.mark.parametrize("plan", ["dp512.tp2.z3", "dp2.tp2.z3"])
def test_tensor_parallel_traffic_is_that_of_the_simulator(trace, plan):
    """Same bytes per micro-batch as the simulator, at 4 ranks and at 1,024; the run also gathers its logits."""
    plan_, spec = Plan.parse(plan), models.spec("gpt-tiny")
    traced = trace("gpt-tiny", plan, global_batch=plan_.dp)
    table = ops(spec, plan_, dtype="fp32")
    tensor = table[table["group"] == "tp"].groupby("collective")["size_bytes"].agg(["count", "sum"])
    logits = 4 * spec.sequence * spec.vocab
    count, size = calls(traced, "all_gather", "tp")
    assert (count - 1, size - logits) == tuple(tensor.loc["all_gather"])
    assert calls(traced, "reduce_scatter", "tp") == tuple(tensor.loc["reduce_scatter"])
    assert traced.flops["forward"] == pytest.approx(spec.forward_flops(1) / 2)


def test_context_and_expert_exchanges(trace):
    """Two all-to-alls per layer and pass; keys, queries and values in one of them."""
    spec = models.spec("gpt-tiny")
    count, _ = calls(trace("gpt-tiny", "dp2.cp2", global_batch=2), "all_to_all", "cp")
    assert count == 4 * spec.layers
    count, _ = calls(trace("moe-tiny", "dp4.ep2", global_batch=4), "all_to_all", "ep")
    assert count == 5 * spec.layers  # and one that tells how many rows come


def test_stages_send_activations(trace):
    spec = models.spec("gpt-tiny")
    activation = 4 * spec.sequence * spec.hidden
    first = trace("gpt-tiny", "dp2.pp2", global_batch=8)
    last = trace("gpt-tiny", "dp2.pp2", global_batch=8, rank=3)
    for traced in (first, last):
        assert calls(traced, "send", "pp") == calls(traced, "recv", "pp") == (4, 4 * activation)
        assert traced.layers == 2
    assert last.flops["forward"] > first.flops["forward"]  # the head
