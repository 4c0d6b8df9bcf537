"""The MAD-Max performance model: when each piece of a step runs, and how long the step
takes.

As the public release of [Hsia et al., ISCA 2024, arXiv 2310.02784] applies it (behaviour
recorded): per GPU one in-order stream of compute and one of communication. What each
piece is and how long it takes is in `papers.madmax.layers`; here it is issued in the
release's order and laid out by `simulator.events.engine`. A collective is blocking when
the next layer's compute waits for it. Backward starts when all of forward has ended.
"""

import difflib
import math
from collections.abc import Mapping
from dataclasses import asdict
from itertools import zip_longest

import pandas as pd

from madmax_lib.papers.madmax.layers import workload
from madmax_lib.papers.madmax.rules import MadmaxRules, parse_rules
from madmax_lib.simulator.events.engine import Program, Stream, run, to_timeline
from madmax_lib.timeline import Meta, Timeline

_COMPUTE = Stream.COMPUTE.value
_COMM = 1  # one stream of all collectives
_LABELS = ["model", "system", "task", "dense_strategy"]
_NEEDED = ["model", "type", "system", "task", "dense_strategy", "global_batch"]
OP_COLUMNS = {  # first word of an op's name: column
    "gemm": "gemm_ms",
    "embedding": "emb_ms",
    "all_to_all": "all2all_ms",
    "all_reduce": "allreduce_ms",
    "all_gather": "allgather_ms",
    "reduce_scatter": "reducescatter_ms",
}
_COLUMNS = [
    *_NEEDED,
    "local_dense_batch",
    "weights_gb_per_device",
    *OP_COLUMNS.values(),
    "exposed_comm_ms",
    "overlapped_comm_ms",
    "iteration_ms",
    "throughput_samples_per_s",
]


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
    records = cases.to_dict("records")
    steps = _device_steps(records, models, systems, rules)
    rows = map(_row, records, steps)
    return pd.DataFrame(rows, columns=_COLUMNS, index=cases.index)


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
    [step] = _device_steps([case], models, systems, rules)
    provenance = {field: str(case[field]) for field in _LABELS}
    provenance |= {"source": "arXiv 2310.02784", "rules": asdict(rules)}
    provenance["global_batch"] = float(case["global_batch"])
    provenance["local_dense_batch"] = float(step.local_batch)
    ranks = {0: list(range(step.devices))}
    about = (step.devices, ranks, provenance["system"])
    meta = Meta("simulated", *about, provenance=provenance)
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
    return {
        "hours": hours,
        "gpu_hours": gpu_hours,
        "cost_usd": gpu_hours * usd_per_gpu_hour,
        "energy_mwh": gpu_hours * tdp_w_per_gpu / 1e6,
    }


def _by_name(table, what, *needed):
    if missing := [column for column in needed if column not in table.columns]:
        raise ValueError(f"{what} lack the column(s) {', '.join(missing)}")
    if twice := table["name"][table["name"].duplicated()].tolist():
        raise ValueError(f"name={twice[0]!r} is twice in {what}")
    return {row["name"]: row for row in table.to_dict("records")}


def _row_of(table, name, what):
    if name in table:
        return table[name]
    near = difflib.get_close_matches(str(name), map(str, table), 3, 0.0)
    raise ValueError(f"unknown {what} {name!r}; nearest: {', '.join(near)}")


def _device_steps(cases, models, systems, rules):
    """Work of a GPU in each case."""
    models = _by_name(models, "models", "name", "type")
    systems = _by_name(systems, "systems", "name")
    return [_device_step(case, models, systems, rules) for case in cases]


def _device_step(case, models, systems, rules):
    """Work of a GPU in a case, checked against its model, system and batch."""
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
    batch = case.get("local_dense_batch", math.nan)
    if not (math.isnan(batch) or math.isclose(batch, step.local_batch, rel_tol=1e-9)):
        rule = f"global_batch x tp degree / devices = {step.local_batch:g}"
        raise ValueError(
            f"local_dense_batch={batch} is not {rule} ({case['model']}, "
            f"{case['dense_strategy']})"
        )
    return step


def _row(case, step):
    """Row of `evaluate`, in the order of `_COLUMNS`."""
    program = _program(step, case["task"])
    iteration_s = max(run(program)[1])
    pieces_s = dict.fromkeys(OP_COLUMNS, 0.0)
    for name, duration_s in zip(program.name, program.duration_s, strict=True):
        pieces_s[name.partition(" ")[0]] += duration_s
    # exposed = iteration - compute; overlapped = all communication - exposed
    compute_s = pieces_s["gemm"] + pieces_s["embedding"]
    exposed_s = iteration_s - compute_s
    overlapped_s = sum(pieces_s.values()) - compute_s - exposed_s
    batch = step.local_batch
    times_s = [*pieces_s.values(), exposed_s, overlapped_s, iteration_s]
    return [
        *(case[field] for field in _NEEDED),
        int(batch) if batch == int(batch) else batch,
        step.weight_bytes / 1e9,
        *(1e3 * time_s for time_s in times_s),
        case["global_batch"] / iteration_s,
    ]


def _program(step, task):
    """Forward, then backward unless the task is inference."""
    issuer = _Issuer(step)
    issuer.forward()
    if task != "inference":
        backward = issuer.backward_dlrm if step.is_dlrm else issuer.backward_transformer
        backward([layer for layer in reversed(step.layers) if layer.backward_s > 0])
    return issuer.program


_Ops = tuple[int, ...]  # numbers of ops that another one waits for


class _Issuer:
    """Ops of one step, issued in the order of the release."""

    def __init__(self, step):
        self.step = step
        self.program = Program()

    def forward(self):
        """Lookup and its exchange, then layer after layer."""
        embedding = self.step.embedding
        looked_up = (self._look_up("forward", ()),)
        embedded = looked_up
        if embedding.forward:
            embedded = (self._send(embedding.forward, "embedding forward", looked_up),)
        # AllGather(l) waits for GEMM(l-2), so it runs at most one layer ahead; an LLM
        # counts the lookup as GEMM(-1).
        gemms = [(), () if self.step.is_dlrm else looked_up]
        ready = ()
        for layer in self.step.layers:
            gathered = self._gather(layer.gather, layer, "forward", gemms[-2])
            inputs = ready + embedded if layer.after_embedding else ready
            gemm, ready = self._compute(layer, "forward", inputs, gathered)
            gemms.append(gemm)

    def backward_dlrm(self, layers):
        """Top and transformer, the embedding's gradient, the bottom MLP beside it, at
        last the embedding.
        """
        upper = [layer for layer in layers if layer.after_embedding]
        bottom = [layer for layer in layers if not layer.after_embedding]
        ready = self._just_in_time(upper, self._tails())
        embedding = self.step.embedding
        if embedding.trained:
            # The gradient's All2All queues behind the collectives issued so far; the
            # bottom MLP does not depend on it.
            sent = self._send(embedding.backward, "embedding backward", ready)
        self._just_in_time(bottom, ready)
        if embedding.trained:
            self._look_up("backward", (sent,))

    def backward_transformer(self, layers):
        """All layers, then the embedding and the AllReduce of its gradient."""
        if self.step.gathers_ahead:
            self._one_ahead(layers, self._tails())
        else:
            self._just_in_time(layers, self._tails())
        embedding = self.step.embedding
        if embedding.trained:
            # both after everything else, hence always exposed
            looked_up = self._look_up("backward", self._tails())
            self._send(embedding.backward, "embedding backward", (looked_up,))

    def _just_in_time(self, layers, ready):
        """Pre-optimised backward pass; returns what the next op waits for."""
        # AllGather(l) queues behind the collectives of the layer before it: AllGather,
        # GEMM and ReduceScatter run one after another, nothing of fsdp is hidden.
        for layer in layers:
            gathered = self._gather(layer.gather, layer, "backward", ready)
            _, ready = self._compute(layer, "backward", ready, gathered)
        return ready

    def _one_ahead(self, layers, ready):
        """Optimised backward pass: the next layer's gather is issued before this
        layer's GEMM and collectives, and runs beside the GEMM.
        """
        before = ready
        first = self.step.first_gather
        gathered = self._gather(first, layers[0], "backward", ready)
        for layer, following in zip_longest(layers, layers[1:]):
            ahead = ()
            if following:
                ahead = self._gather(following.gather, following, "backward", before)
            before, ready = self._compute(layer, "backward", ready, gathered)
            gathered = ahead

    def _compute(self, layer, phase, ready, gathered):
        """Issue experts' dispatch, GEMM, experts' combine and the layer's collectives.

        Returns the GEMM, and the op that the next layer waits for: the last blocking
        collective, else the GEMM.
        """
        forward = phase == "forward"
        duration_s = layer.forward_s if forward else layer.backward_s
        where = f"{layer.name} {phase}"
        inputs = ready + gathered
        if layer.exchange:
            inputs += (self._send(layer.exchange, f"{where} dispatch", inputs),)
        gemm = (
            self.program.op(_COMPUTE, "compute", f"gemm {where}", duration_s, inputs),
        )
        ready = gemm
        if layer.exchange:
            ready = (self._send(layer.exchange, f"{where} combine", gemm),)
        for collective in layer.forward if forward else layer.backward:
            sent = (self._send(collective, where, gemm),)
            ready = sent if collective.blocking else ready
        return gemm, ready

    def _gather(self, gather, layer, phase, after):
        return (self._send(gather, f"{layer.name} {phase}", after),) if gather else ()

    def _look_up(self, phase, after):
        lookup_s = self.step.embedding.lookup_s
        name = f"embedding lookup {phase}"
        return self.program.op(_COMPUTE, "compute", name, lookup_s, after)

    def _send(self, collective, where, after):
        return self.program.op(
            _COMM,
            "comm",
            f"{collective.name} {where} {collective.cargo}",
            collective.duration_s,
            after,
            group=collective.level,
            size_bytes=collective.size_bytes,
        )

    def _tails(self):
        """Last op of each stream: whoever waits for them waits for all issued so far."""
        streams = self.program.stream[::-1]
        last = len(streams) - 1
        return tuple(
            last - streams.index(stream)
            for stream in (_COMPUTE, _COMM)
            if stream in streams
        )
