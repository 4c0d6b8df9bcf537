"""A calibrated machine: its devices and links as a cluster, the constants of its runs,
and their file.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from madmax_lib import catalog
from madmax_lib.base.atomic import write_text
from madmax_lib.calibration.scale import FittingScale, covariance_of
from madmax_lib.catalog import Cluster
from madmax_lib.plan import Case
from madmax_lib.runs.read import with_nulls
from madmax_lib.simulator import step_time
from madmax_lib.simulator.costs.inputs import Steps
from madmax_lib.simulator.rates.parameters import (
    Parameters,
    bounds,
    constants_of,
    shipped,
    to_json,
)
from madmax_lib.simulator.uncertainty import COMPONENTS

# where a fit of a machine begins whose devices are processes on a CPU
_CPU = catalog.read_object(catalog.data_file("cpu_constants.json"))
# standard deviations of the logarithms of constants: of CPUs, which no shipped row
# shows, and of other machines
_WIDE = 0.7
_NARROW = 0.3
# log residuals of a step and of a part that count as one standard deviation
_STEP = 0.03
_PART = 0.10
_SEEN = 1e-3  # relative change of a step by half more of a constant that its time tells
_PARTS = ("gemm_s", "attention_s", "optimizer_s")  # which traces tell apart
_POOR = 0.15  # median error from which on a calibration is not to be relied on
_LEAST_S = 1e-12  # in place of parts that take no time
# bytes of a link take so many seconds each where a search begins: near, far; then a
# call, and a further rank
_LINKS_BEGIN = (1e-9, 1e-8, 2e-4, 2e-5)
_LINKS_PRIOR = 0.05  # weight of that beginning: it decides what no row shows


@dataclass(frozen=True)
class Machine:
    """A calibrated machine.

        here = mm.machine("calibration")
        mm.simulate("gpt2", here.cluster, "dp2", global_batch=8, parameters=here.parameters)

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

    def judged(self, results: pd.DataFrame) -> "Machine":
        """The machine with its errors on runs that the fit had not seen, and intervals
        so wide that nine in ten of these would have been inside.

        results: a row a run with error, predicted_s and high_s.
        """
        names = ["error", "predicted_s", "high_s"]
        results = results.reindex(columns=names).dropna().astype(float)
        errors = results["error"]
        # |log(measured / predicted)| in half-widths of the interval
        half = np.log(results["high_s"] / results["predicted_s"])
        missed = np.log1p(errors).abs() / half
        # without a run the quantile is NaN, which is not more than 1
        wider = max(1.0, float(missed.quantile(0.9, interpolation="higher")))
        about = {
            "runs": len(results),
            "median_error": float(errors.abs().median()),
            "worst_error": float(errors.abs().max()),
            "wider": wider,
        }
        residuals = dict(self.parameters.residuals)
        residuals["quantile"] *= wider
        return replace(
            self,
            parameters=replace(self.parameters, residuals=residuals),
            provenance={**self.provenance, "judged": about},
        )

    @property
    def verdict(self) -> str:
        """Sentences on how well runs that the fit had not seen were predicted."""
        about = self.provenance.get("judged", {})
        if not about.get("runs"):
            return "No further run was done: its errors are unknown."
        median = about["median_error"]
        text = (
            f"Steps of {about['runs']} further runs were predicted within {median:.1%} "
            f"(median), {about['worst_error']:.1%} at worst."
        )
        if (wider := about.get("wider", 1.0)) > 1:
            text += (
                f" Its intervals are {wider:.1f} times as wide as those of the fit, so "
                "that nine in ten of these runs are inside."
            )
        if median > _POOR:
            text += " Do not rely on it: calibrate again on an idle machine."
        return text

    def save(self, path: Path) -> None:
        """Write the file that `machine` reads."""
        content = {
            "cluster": asdict(self.cluster),
            "parameters": to_json(self.parameters),
            "dtype": self.dtype,
            "provenance": self.provenance,
        }
        write_text(path, json.dumps(with_nulls(content), indent=1) + "\n")


def machine(directory: str | Path) -> Machine:
    """The machine of a calibration, of its directory or its machine.json.

    Raises FileNotFoundError where there is none, ValueError for another file.
    See also: mm.calibrate, mm.cluster.
    """
    path = Path(directory)
    path = path / "machine.json" if path.suffix != ".json" else path
    cluster = catalog.cluster(path)
    parameters = constants_of(path)
    content = json.loads(path.read_text())
    try:
        return Machine(cluster, parameters, content["dtype"], content["provenance"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a machine file ({error})") from None


def link_rates(table: pd.DataFrame) -> dict[str, float]:
    """Rates of the links that measured collectives show, where formulas must stand in
    for groups not measured.

    table: rows of a bench, as `MeasuredCollectives` takes. Least squares over the
    logarithms of all-gathers and messages: near and far, bytes/s inside a node and of a
    rank's share of the network (NaN where no group shows them); latency_s, of a call;
    hop_s, of a further rank.
    """
    kinds = table["collective"].isin(["all_gather", "send_recv"])
    rows = table[kinds & (table["ranks"] > 1)]
    ranks, nodes, size_bytes = (
        rows[name].to_numpy(float) for name in ("ranks", "nodes", "size_bytes")
    )
    gathers = (rows["collective"] == "all_gather").to_numpy()
    crosses = nodes > 1
    has_near = ranks > nodes  # some ranks of the group share a node
    # a ring passes (p-1)/p of the gathered bytes on, over one uplink per rank of a node
    sent_bytes = size_bytes * np.where(gathers, (ranks - 1) / ranks, 1.0)
    uplinks = np.where(gathers, np.maximum(ranks / nodes, 1.0), 1.0)
    measured = np.log(rows["seconds"].to_numpy(float))
    begin = np.log(_LINKS_BEGIN)

    def residuals(point):
        """Log errors of t = latency + (p-1) hop + bytes * seconds per byte, priors."""
        near_s, far_s, latency_s, hop_s = np.exp(point)
        # the slower of network and node
        across_s = np.maximum(far_s / uplinks, has_near * near_s)
        byte_s = np.where(crosses, across_s, near_s)
        seconds = latency_s + hop_s * (ranks - 1) + sent_bytes * byte_s
        return np.append(np.log(seconds) - measured, _LINKS_PRIOR * (point - begin))

    solution = least_squares(residuals, begin, loss="soft_l1")
    near_s, far_s, latency_s, hop_s = np.exp(solution.x).tolist()
    return {
        "near": 1 / near_s if has_near.any() else np.nan,
        "far": 1 / far_s if crosses.any() else np.nan,
        "latency_s": latency_s,
        "hop_s": hop_s,
    }


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
    first, scale = _scale_of(steps, begin)
    names = ["step_s", *_PARTS]
    columns = [name for name in names if measured.get(name, pd.Series()).notna().any()]
    log_s = np.log(measured[columns].where(measured[columns] > 0).to_numpy(float))
    is_part = np.array(columns) != "step_s"
    # (runs, columns): parts under tp are not compared
    log_s[np.ix_([case.plan.tp > 1 for case in cases], is_part)] = np.nan
    weights = 1 / np.where(is_part, _PART, _STEP)

    def errors(point):
        """(runs, columns) log(predicted / measured), 0 where nothing was measured."""
        predicted = parts_of(steps, scale.moved(first, point))[columns]
        return np.nan_to_num(np.log(np.maximum(predicted.to_numpy(), _LEAST_S)) - log_s)

    def residuals(point):
        of_runs = (errors(point) * weights).ravel()
        return np.concatenate([of_runs, (point - scale.prior) / scale.sigma])

    solution = least_squares(
        residuals,
        scale.prior,
        bounds=(scale.low, scale.high),
        loss="soft_l1",
        x_scale=scale.sigma,
    )
    unexplained = float(np.sqrt(np.mean(errors(solution.x)[:, 0] ** 2)))
    widths = dict.fromkeys(COMPONENTS[1:], unexplained)
    first = replace(
        first,
        intervals=begin.intervals,
        links=begin.links,
        residuals={"quantile": 1.645, "constants": 1.0, **widths},
        sensitivities=shipped().sensitivities,
        provenance={"rows": len(cases), "software": "workbench"},
    )
    return scale.solved(first, solution.x, covariance_of(solution))


def parts_of(steps: Steps, parameters: Parameters) -> pd.DataFrame:
    """Seconds of steps and of the parts that a trace tells apart: step_s, gemm_s (on a
    GPU with pointwise work), attention_s, optimizer_s.
    """
    times = step_time(steps, parameters)
    # a GPU's kernels of casts and sums of weights are pointwise ones in a trace
    on_gpu = 1 - steps.traits.on_host
    pointwise_s = on_gpu * times["pointwise_s"]
    times["gemm_s"] = times["gemm_s"] + times["head_s"] + pointwise_s
    return pd.DataFrame({name: times[name] for name in ("step_s", *_PARTS)})


def _scale_of(steps, begin):
    """Constants where a fit begins, and those of them that these runs can tell.

    They move as logarithms and but `alone` have no bounds: a machine may be as slow as
    it likes.
    """
    on_cpu = bool(np.any(steps.traits.on_host))
    kernels = (
        "weight_bytes",
        "pointwise_factor",
        "launch_s",
        "step_s",
        "comm_launch_s",
    )
    classes = {
        "gemm_efficiency": steps.machine.gemm,
        "attention_efficiency": steps.machine.attention,
        **dict.fromkeys(kernels, steps.traits.kernels),
        **dict.fromkeys(("moe_pointwise", "moe_launch_s"), steps.traits.mixture),
    }
    # constant: the name of its class
    bases = {
        key: name
        for name, coded in classes.items()
        for key in coded.keys(name, bounds().index)
    }
    single = [
        "gemm_bytes",
        "optimizer_factor",
        "moe_gemm",
        # all alone: their pace beside others is not known
        *(["alone"] if on_cpu and np.any(steps.plan.world_size > 1) else []),
    ]
    bases |= {name: name for name in single}
    for timed in begin.provenance.get("timed", ()):
        bases.pop(timed, None)
    constants = dict(begin.constants)
    if on_cpu:
        constants |= {key: _CPU[name] for key, name in bases.items() if name in _CPU}
    first = Parameters(constants=constants, collectives=begin.collectives)
    still_s = step_time(steps, first)["step_s"]
    names = []
    for key in bases:
        # a CPU may have its own pace while its peers idle, which is fixed elsewhere
        if bounds().at[key, "scale"] == "fixed" and key != "alone":
            continue
        moved = replace(first, constants={**constants, key: 1.5 * constants[key]})
        moved_s = step_time(steps, moved)["step_s"]
        if np.any(np.abs(moved_s / still_s - 1) > _SEEN):
            names.append(key)
    count = len(names)
    scale = FittingScale(
        tuple(names),
        logarithmic=np.ones(count, bool),
        prior=np.log([constants[name] for name in names]),
        low=np.full(count, -np.inf),
        # nobody is slower alone than beside others
        high=np.where(np.array(names) == "alone", 0.0, np.inf),
        sigma=np.full(count, _WIDE if on_cpu else _NARROW),
    )
    return first, scale
