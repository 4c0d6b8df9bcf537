"""Which machine was calibrated? Its devices and links as a cluster, the constants of
its runs, and their file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from madmax_lib import catalog
from madmax_lib.base.atomic import write_text
from madmax_lib.calibration.fit import posterior
from madmax_lib.catalog.models import Cluster
from madmax_lib.plan.case import Case
from madmax_lib.runs.read import with_nulls
from madmax_lib.simulator.costs.inputs import Steps
from madmax_lib.simulator.rates.parameters import (
    Parameters,
    bounds,
    constants_of,
    shipped,
    to_json,
)
from madmax_lib.simulator.steady.step_time import step_time

__all__ = ["Machine", "fit_constants", "link_rates", "machine", "parts_of"]

_CPU = {  # where a fit of a machine begins whose devices are processes on a CPU
    "gemm_efficiency": 0.8,
    "attention_efficiency": 0.3,
    "gemm_bytes": 0.5,
    "weight_bytes": 4.0,
    "pointwise_factor": 2.0,
    "optimizer_factor": 1.0,
    "launch_s": 1.5e-5,
    "step_s": 4e-3,
    "comm_launch_s": 1e-3,
    "moe_pointwise": 3.0,
    "moe_launch_s": 5e-4,
    "alone": 0.9,
}
# standard deviations of their logarithms, and of those of other machines
_WIDE = 0.7
_NARROW = 0.3
# log residuals of a step and of a part that count as one standard deviation
_STEP = 0.03
_PART = 0.10
_SEEN = 1e-3  # relative change of a step by half more of a constant that its time tells
_PARTS = ("gemm_s", "attention_s", "optimizer_s")  # which traces tell apart


@dataclass(frozen=True)
class Machine:
    """A calibrated machine:
    `simulate(model, machine.cluster, plan, parameters=machine.parameters, ...)`.

    cluster: its devices and links, at the rates that were measured.
    parameters: constants fitted to its runs, with the collectives that were timed.
    dtype: of the matrix products of its runs (fp32).
    provenance: where, when and from what; with the stages that could not run, a line
    each.
    """

    cluster: Cluster
    parameters: Parameters
    dtype: str = "fp32"
    provenance: Mapping[str, object] = field(default_factory=dict, hash=False)

    def save(self, path: Path) -> None:
        """Write the file that `machine` reads."""
        parts = {
            "cluster": asdict(self.cluster),
            "parameters": to_json(self.parameters),
            "dtype": self.dtype,
        }
        parts |= {"provenance": self.provenance}
        write_text(path, json.dumps(with_nulls(parts), indent=1) + "\n")


def machine(directory: str | Path) -> Machine:
    """The machine of a calibration, of its directory or its machine.json.

    Raises FileNotFoundError where there is none, ValueError for another file.
    See also: mm.calibrate, mm.cluster.
    """
    path = Path(directory)
    path = path / "machine.json" if path.suffix != ".json" else path
    if not path.exists():
        raise FileNotFoundError(
            f"{path}: no calibration here; `python -m madmax_lib calibrate -o DIR` "
            "makes one"
        )
    cluster = catalog.cluster(path)
    parameters = constants_of(path)
    content = json.loads(path.read_text())
    try:
        return Machine(
            cluster,
            parameters,
            **{name: content[name] for name in ("dtype", "provenance")},
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not the file of a machine ({error})") from None


def link_rates(table: pd.DataFrame) -> dict[str, float]:
    """Rates of the links that measured collectives show, where formulas must stand in
    for groups not measured.

    table: rows of a bench, as `MeasuredCollectives` takes. Least squares over the
    logarithms of all-gathers and
    messages: near and far, bytes/s inside a node and of a rank's share of the network
    (NaN where no group shows them); latency_s, of a call; hop_s, of a further rank.
    """
    rows = table[
        table["collective"].isin(["all_gather", "send_recv"]) & (table["ranks"] > 1)
    ]
    ranks, nodes, size = (
        rows[name].to_numpy(float) for name in ("ranks", "nodes", "size_bytes")
    )
    gather = (rows["collective"] == "all_gather").to_numpy()
    far = nodes > 1
    share = np.where(gather, (ranks - 1) / ranks, 1.0)
    ports = np.where(gather, np.maximum(ranks / nodes, 1.0), 1.0)

    def seconds(point: np.ndarray) -> np.ndarray:
        near_s, far_s, latency_s, hop_s = np.exp(point)
        byte_s = np.where(
            far, np.maximum(far_s / ports, (ranks > nodes) * near_s), near_s
        )
        return latency_s + hop_s * (ranks - 1) + share * size * byte_s

    measured = np.log(rows["seconds"].to_numpy(float))
    begin = np.log([1e-9, 1e-8, 2e-4, 2e-5])
    solution = least_squares(
        lambda point: np.append(
            np.log(seconds(point)) - measured, 0.05 * (point - begin)
        ),
        begin,
        loss="soft_l1",
    )
    near_s, far_s, latency_s, hop_s = np.exp(solution.x).tolist()
    shown = {
        "near": 1 / near_s if (ranks > nodes).any() else np.nan,
        "far": 1 / far_s if far.any() else np.nan,
    }
    return shown | {"latency_s": latency_s, "hop_s": hop_s}


def fit_constants(
    cases: Sequence[Case], measured: pd.DataFrame, begin: Parameters
) -> Parameters:
    """Constants of a machine from its runs.

    cases: of the runs. measured: a row each, with step_s and, where a trace tells them,
    gemm_s, attention_s and optimizer_s (NaN where not; not looked at under tp, whose
    head waits too). begin: constants where the fit begins and that the runs cannot
    tell, with the collectives. The intervals follow from the covariance, and the
    residuals from how far the steps stay apart.
    """
    steps = Steps.stack(list(cases))
    constants, sigma = _priors(steps, begin)
    names = [name for name in sigma if _moves(name, steps, begin, constants)]
    prior = np.log([constants[name] for name in names])
    widths = np.array([sigma[name] for name in names])
    columns = [
        name
        for name in ("step_s", *_PARTS)
        if name in measured and measured[name].notna().any()
    ]
    observed = np.log(measured[columns].where(measured[columns] > 0).to_numpy(float))
    observed[
        np.ix_(
            [case.plan.tp > 1 for case in cases], [name != "step_s" for name in columns]
        )
    ] = np.nan
    weight = np.array(
        [1 / _STEP if name == "step_s" else 1 / _PART for name in columns]
    )

    def errors(point: np.ndarray) -> np.ndarray:
        fitted = constants | dict(zip(names, np.exp(point).tolist(), strict=True))
        predicted = parts_of(
            steps, Parameters(constants=fitted, collectives=begin.collectives)
        )[columns]
        return np.nan_to_num(np.log(np.maximum(predicted.to_numpy(), 1e-12)) - observed)

    def residuals(point: np.ndarray) -> np.ndarray:
        return np.concatenate(
            [(errors(point) * weight).reshape(-1), (point - prior) / widths]
        )

    solution = least_squares(residuals, prior, loss="soft_l1", x_scale=widths)
    covariance, *ends = posterior(solution)
    low, high = np.exp(ends)
    spread = float(np.sqrt(np.mean(errors(solution.x)[:, 0] ** 2)))
    return Parameters(
        constants=constants
        | dict(zip(names, np.exp(solution.x).tolist(), strict=True)),
        intervals=begin.intervals
        | dict(zip(names, zip(low.tolist(), high.tolist(), strict=True), strict=True)),
        fitted=tuple(names),
        covariance=tuple(map(tuple, covariance.tolist())),
        collectives=begin.collectives,
        links=begin.links,
        residuals={
            "quantile": 1.645,
            "constants": 1.0,
            "stranger": spread,
            "mixture": spread,
            "rare": spread,
        },
        sensitivities=shipped().sensitivities,
        provenance={"rows": len(cases), "software": "workbench"},
    )


def parts_of(steps: Steps, parameters: Parameters) -> pd.DataFrame:
    """Seconds of steps and of the parts that a trace tells apart: step_s, gemm_s,
    attention_s, optimizer_s.
    """
    times = step_time(steps, parameters)
    times["gemm_s"] = times["gemm_s"] + times["head_s"]
    return pd.DataFrame({name: times[name] for name in ("step_s", *_PARTS)})


def _priors(
    steps: Steps, begin: Parameters
) -> tuple[dict[str, float], dict[str, float]]:
    """Constants where a fit begins, and the standard deviations of the logarithms of
    those that may move.
    """
    on_host = np.any(steps.traits.on_host)
    (machine, habits) = (steps.machine, steps.traits)
    classes = {
        "gemm_efficiency": machine.gemm,
        "attention_efficiency": machine.attention,
    }
    classes |= dict.fromkeys(
        ("weight_bytes", "pointwise_factor", "launch_s", "step_s", "comm_launch_s"),
        habits.kernels,
    )
    classes |= dict.fromkeys(("moe_pointwise", "moe_launch_s"), habits.mixture)
    names = {name: coded.keys(name, bounds().index) for name, coded in classes.items()}
    names |= {
        name: [name]
        for name in (
            "gemm_bytes",
            "optimizer_factor",
            "moe_gemm",
            *(["alone"] if on_host else []),
        )
    }
    constants = dict(begin.constants)
    sigma = {}
    for base, keys in names.items():
        for key in keys:
            if on_host:
                constants[key] = _CPU.get(base, constants[key])
            if bounds().at[key, "scale"] != "fixed" or base == "alone":
                sigma[key] = _WIDE if on_host else _NARROW
    return constants, sigma


def _moves(
    name: str, steps: Steps, begin: Parameters, constants: Mapping[str, float]
) -> bool:
    """Whether a constant changes any of these steps."""
    step_s = [
        step_time(
            steps,
            Parameters(
                constants=constants | {name: factor * constants[name]}, collectives=of
            ),
        )["step_s"]
        for of in [begin.collectives]
        for factor in (1.0, 1.5)
    ]
    return bool(np.any(np.abs(step_s[1] / step_s[0] - 1) > _SEEN))
