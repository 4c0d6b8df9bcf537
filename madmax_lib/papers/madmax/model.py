"""When does each piece of a MAD-Max step run, and how long is the step?

The performance model of MAD-Max [Hsia et al., ISCA 2024, arXiv 2310.02784] as its
public release applies it (behaviour recorded): per GPU one in-order stream of compute
and one of communication. What each piece is and how long it takes is in
`papers.madmax.layers`; here it is issued in the release's order and laid out by
`simulator.schedule.engine`. A collective is blocking when the next layer's compute
waits for it. Backward starts when all of forward has ended.
"""

import difflib
import math
from collections.abc import Mapping
from dataclasses import asdict
from itertools import zip_longest

import pandas as pd

from madmax_lib.papers.madmax.layers import Collective, DenseLayer, DeviceStep, workload
from madmax_lib.papers.madmax.rules import MadmaxRules, parse_rules
from madmax_lib.simulator.events.engine import Program, run, to_timeline
from madmax_lib.simulator.events.streams import Stream
from madmax_lib.timeline.timeline import Meta, Timeline

__all__ = ["cloud_cost", "evaluate", "timeline"]

# one stream of all collectives
_COMPUTE = Stream.COMPUTE.value
_COMM = 1
_NEEDED = ("model", "type", "system", "task", "dense_strategy", "global_batch")
_PIECES = {  # first word of an op's name -> column
    "gemm": "gemm_ms",
    "embedding": "emb_ms",
    "all_to_all": "all2all_ms",
    "all_reduce": "allreduce_ms",
    "all_gather": "allgather_ms",
    "reduce_scatter": "reducescatter_ms",
}


def evaluate(
    cases: pd.DataFrame,
    models: pd.DataFrame,
    systems: pd.DataFrame,
    *,
    rules: str | MadmaxRules = "released",
) -> pd.DataFrame:
    """Time of one step for each case: one row per case, same order and index.

    cases: model, type, system, task (pretrain, inference, finetune), dense_strategy
    (such as "fsdp" or "tp,ddp"), global_batch and, if there, local_dense_batch, which
    must equal global_batch x tp degree / devices.
    models, systems: configuration tables, looked up by their column name.
    Fine-tuning trains the head only: the top MLP of a DLRM, the last block of an LLM or
    ViT.
    Result: these columns, weights_gb_per_device, the time of each piece in ms,
    exposed_comm_ms, overlapped_comm_ms, iteration_ms and throughput_samples_per_s.
    Raises ValueError naming field, value and rule.
    """
    rules = parse_rules(rules)
    if missing := [column for column in _NEEDED if column not in cases.columns]:
        raise ValueError(f"cases lack the column(s) {', '.join(missing)}")
    models = _by_name(models, "models")
    systems = _by_name(systems, "systems")
    columns = [c for c in (*_NEEDED, "local_dense_batch") if c in cases.columns]
    rows = [
        _row(case, models, systems, rules) for case in cases[columns].to_dict("records")
    ]
    sizes = ["local_dense_batch", "weights_gb_per_device"]
    times = ["exposed_comm_ms", "overlapped_comm_ms"]
    names = [
        *_NEEDED,
        *sizes,
        *_PIECES.values(),
        *times,
        "iteration_ms",
        "throughput_samples_per_s",
    ]
    return pd.DataFrame(rows, columns=names, index=cases.index)


def timeline(
    case: Mapping | pd.Series,
    models: pd.DataFrame,
    systems: pd.DataFrame,
    *,
    rules: str | MadmaxRules = "released",
) -> Timeline:
    """The step of one case as a Timeline: stream 0 computes, stream 1 communicates,
    rank 0 stands for all.
    """
    rules = parse_rules(rules)
    case = dict(case)
    if missing := [field for field in _NEEDED if field not in case and field != "type"]:
        raise ValueError(f"the case lacks {', '.join(missing)}")
    step = _device_step(
        case, _by_name(models, "models"), _by_name(systems, "systems"), rules
    )
    provenance = {
        field: str(case[field])
        for field in ("model", "system", "task", "dense_strategy")
    }
    provenance |= {"source": "arXiv 2310.02784", "rules": asdict(rules)}
    provenance |= {
        "global_batch": float(case["global_batch"]),
        "local_dense_batch": float(step.local_batch),
    }
    represents = {0: list(range(step.devices))}
    meta = Meta(
        "simulated",
        step.devices,
        represents,
        provenance["system"],
        provenance=provenance,
    )
    return to_timeline(_program(step, case["task"]), meta)


def cloud_cost(throughput, samples, n_gpus, usd_per_gpu_hour, tdp_w_per_gpu) -> dict:
    """hours, gpu_hours, cost_usd and energy_mwh of `samples` at `throughput` samples/s;
    scalars or arrays.

    As in the artifact's cloud sheet: a GPU draws its node's TDP / GPUs per node all the
    time.

    >>> [round(float(value), 4) for value in cloud_cost(1e6, 5e9, 128, 12.29, 1275).values()]
    [1.3889, 177.7778, 2184.8889, 0.2267]
    """
    hours = samples / throughput / 3600
    gpu_hours = hours * n_gpus
    cost_usd = gpu_hours * usd_per_gpu_hour
    energy_mwh = gpu_hours * tdp_w_per_gpu / 1e6
    return {
        "hours": hours,
        "gpu_hours": gpu_hours,
        "cost_usd": cost_usd,
        "energy_mwh": energy_mwh,
    }


def _by_name(table: pd.DataFrame, what: str) -> dict[str, dict]:
    if missing := [
        c
        for c in ("name", *(["type"] if what == "models" else []))
        if c not in table.columns
    ]:
        raise ValueError(f"{what} lack the column(s) {', '.join(missing)}")
    if twice := table["name"][table["name"].duplicated()].tolist():
        raise ValueError(f"name={twice[0]!r} is twice in {what}")
    return {row["name"]: row for row in table.to_dict("records")}


def _row_of(table: Mapping[str, dict], name: str, what: str) -> dict:
    if name in table:
        return table[name]
    near = difflib.get_close_matches(str(name), [str(other) for other in table], 3, 0.0)
    raise ValueError(f"unknown {what} {name!r}; nearest: {', '.join(near)}")


def _device_step(
    case: Mapping, models: dict, systems: dict, rules: MadmaxRules
) -> DeviceStep:
    """What a GPU does in a case, checked against its model, system and batch."""
    model = _row_of(models, case["model"], "model")
    system = _row_of(systems, case["system"], "system")
    if case.get("type", model["type"]) != model["type"]:
        raise ValueError(
            f"type={case['type']!r} is not the type {model['type']!r} of model "
            f"{case['model']}"
        )
    step = workload(
        model, system, case["dense_strategy"], case["task"], case["global_batch"], rules
    )
    given = case.get("local_dense_batch", math.nan)
    if not (math.isnan(given) or math.isclose(given, step.local_batch, rel_tol=1e-9)):
        rule = f"global_batch x tp degree / devices = {step.local_batch:g}"
        raise ValueError(
            f"local_dense_batch={given} is not {rule} ({case['model']}, "
            f"{case['dense_strategy']})"
        )
    return step


def _row(case: Mapping, models: dict, systems: dict, rules: MadmaxRules) -> tuple:
    step = _device_step(case, models, systems, rules)
    program = _program(step, case["task"])
    iteration_s = max(run(program)[1])
    pieces = dict.fromkeys(_PIECES, 0.0)
    for name, duration_s in zip(program.name, program.duration_s, strict=True):
        pieces[name.partition(" ")[0]] += duration_s
    compute_s = pieces["gemm"] + pieces["embedding"]
    exposed_s = iteration_s - compute_s
    overlapped_s = sum(pieces.values()) - compute_s - exposed_s
    times_ms = [
        1e3 * time_s
        for time_s in (*pieces.values(), exposed_s, overlapped_s, iteration_s)
    ]
    inputs = [case[field] for field in _NEEDED]
    batch = (
        int(step.local_batch)
        if step.local_batch == int(step.local_batch)
        else step.local_batch
    )
    return (
        *inputs,
        batch,
        step.weight_bytes / 1e9,
        *times_ms,
        case["global_batch"] / iteration_s,
    )


def _program(step: DeviceStep, task: str) -> Program:
    """Forward, then backward unless the task is inference."""
    program = Program()
    _forward(program, step)
    if task != "inference":
        layers = [layer for layer in reversed(step.layers) if layer.backward_s > 0]
        (_backward_dlrm if step.is_dlrm else _backward_transformer)(
            program, step, layers
        )
    return program


def _forward(program: Program, step: DeviceStep) -> None:
    """A gather runs at most one layer ahead: it waits for the GEMM two layers before
    (an LLM counts the lookup).
    """
    looked_up = embedded = (_look_up(program, step, "forward", ()),)
    ready = ()
    gemms = [(), () if step.is_dlrm else looked_up]
    if step.embedding.forward:
        embedded = (
            _send(program, step.embedding.forward, "embedding forward", looked_up),
        )
    for layer in step.layers:
        gathered = _gather(program, layer.gather, layer, "forward", gemms[-2])
        inputs = ready + embedded if layer.after_embedding else ready
        gemm, ready = _compute(program, layer, "forward", inputs, gathered)
        gemms.append(gemm)


def _backward_dlrm(
    program: Program, step: DeviceStep, layers: list[DenseLayer]
) -> None:
    """Top and transformer, the embedding's gradient All2All, bottom beside it, at last
    the embedding.
    """
    ready = _tails(program)
    embedding = step.embedding
    ready = _just_in_time(
        program, [layer for layer in layers if layer.after_embedding], ready
    )
    if embedding.trained:
        embedded = _send(program, embedding.backward, "embedding backward", ready)
    _just_in_time(
        program, [layer for layer in layers if not layer.after_embedding], ready
    )
    if embedding.trained:
        _look_up(program, step, "backward", (embedded,))


def _backward_transformer(
    program: Program, step: DeviceStep, layers: list[DenseLayer]
) -> None:
    """All layers, then the embedding and after it the AllReduce of its gradient, both
    after everything else.
    """
    if step.gathers_ahead:
        _one_ahead(program, layers, step.first_gather, _tails(program))
    else:
        _just_in_time(program, layers, _tails(program))
    if step.embedding.trained:
        looked_up = _look_up(program, step, "backward", _tails(program))
        _send(program, step.embedding.backward, "embedding backward", (looked_up,))


def _just_in_time(
    program: Program, layers: list[DenseLayer], ready: tuple[int, ...]
) -> tuple[int, ...]:
    """Backward: a layer's gather queues behind the collectives of the layer before it."""
    for layer in layers:
        gathered = _gather(program, layer.gather, layer, "backward", ready)
        _, ready = _compute(program, layer, "backward", ready, gathered)
    return ready


def _one_ahead(
    program: Program,
    layers: list[DenseLayer],
    first: Collective | None,
    ready: tuple[int, ...],
) -> None:
    """Backward: the next layer's gather is issued before this layer's GEMM and
    collectives.
    """
    before = ready
    gathered = _gather(program, first, layers[0], "backward", ready)
    for layer, following in zip_longest(layers, layers[1:]):
        ahead = (
            _gather(program, following.gather, following, "backward", before)
            if following
            else ()
        )
        before, ready = _compute(program, layer, "backward", ready, gathered)
        gathered = ahead


def _compute(
    program: Program,
    layer: DenseLayer,
    phase: str,
    ready: tuple[int, ...],
    gathered: tuple[int, ...],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Experts' dispatch, GEMM, experts' combine, then the layer's collectives.

    Returns the GEMM, and the op that the next layer waits for: the last blocking
    collective, else the GEMM.
    """
    forward = phase == "forward"
    duration_s = layer.forward_s if forward else layer.backward_s
    where = f"{layer.name} {phase}"
    inputs = ready + gathered
    if layer.exchange:
        inputs = (*inputs, _send(program, layer.exchange, f"{where} dispatch", inputs))
    gemm = ready = (
        program.op(_COMPUTE, "compute", f"gemm {where}", duration_s, inputs),
    )
    if layer.exchange:
        ready = (_send(program, layer.exchange, f"{where} combine", gemm),)
    for collective in layer.forward if forward else layer.backward:
        sent = (_send(program, collective, where, gemm),)
        ready = sent if collective.blocking else ready
    return gemm, ready


def _gather(
    program: Program,
    gather: Collective | None,
    layer: DenseLayer,
    phase: str,
    after: tuple[int, ...],
) -> tuple[int, ...]:
    return (_send(program, gather, f"{layer.name} {phase}", after),) if gather else ()


def _look_up(
    program: Program, step: DeviceStep, phase: str, after: tuple[int, ...]
) -> int:
    return program.op(
        _COMPUTE, "compute", f"embedding lookup {phase}", step.embedding.lookup_s, after
    )


def _send(
    program: Program, collective: Collective, where: str, after: tuple[int, ...]
) -> int:
    name, size_bytes, duration_s, level, what, _ = collective
    return program.op(
        _COMM,
        "comm",
        f"{name} {where} {what}",
        duration_s,
        after,
        group=level,
        size_bytes=size_bytes,
    )


def _tails(program: Program) -> tuple[int, ...]:
    """The last op of each stream: whoever waits for them waits for everything issued so
    far.
    """
    streams = program.stream[::-1]
    last = len(program) - 1
    return tuple(
        last - streams.index(stream)
        for stream in (_COMPUTE, _COMM)
        if stream in streams
    )
