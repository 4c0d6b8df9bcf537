"""The plan to measure next: a tuner in Optuna's manner, that begins with what the
simulator knows.

`ask` names a plan, `tell` says how long its step took, or that it failed. What trials
teach about other plans is in
`surrogate`: the plan asked for has the best chance to be within 5 % of the best one and
to beat what was measured.
"""

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from madmax_lib.base import is_number, require_int, require_type, short_repr
from madmax_lib.base.atomic import write_text
from madmax_lib.catalog import Cluster, Model, Software
from madmax_lib.plan import Case, Plans
from madmax_lib.plan.legal import legal
from madmax_lib.plan.plan import Plan, plans_of
from madmax_lib.plan.rules import check_plan
from madmax_lib.planner.search import search
from madmax_lib.planner.space import Space
from madmax_lib.planner.tuner.surrogate import Candidates, beliefs
from madmax_lib.simulator import PARTS, Parameters, estimate, shipped, usable_bytes
from madmax_lib.simulator.rates.parameters import constants_of

_TOP = 500  # plans of a search to choose from
# log of room over need, of a plan whose states leave the device until it fits
_ROOMY = 0.5
_LEAST_S = 1e-300  # a time above 0
_CHOICE = 3.0  # doublings of a degree that change as much as another choice


@dataclass(eq=False, repr=False)
class Tuner:
    """Asks for plans to measure, and learns from what they took.

    model, cluster: or their names. global_batch, sequence (tokens per sample, the
    model's own if None), dtype,
    software, parameters: of the step, as in `estimate`. plans: those to choose from, a
    list of plans or their texts, or a table of a search; the 500 best of `search` if
    None. seed: of random draws. state: a JSON file that keeps what was told; if it
    exists, the tuning in it goes on, and a plan that was asked for and not told is free
    again.

    A plan that breaks a rule stays in `table` with its reason and is never asked for.
    Raises ValueError for wrong arguments, if no plan can be laid out, or if the file
    keeps the tuning of another case or is torn.

    >>> tuner = Tuner("gpt2-large", "dgx-a100", global_batch=64, plans=["dp8", "dp8.z3", "dp4.tp2"])
    >>> first = tuner.ask()
    >>> tuner.tell(first, step_s=0.5)
    >>> str(first), str(tuner.ask()), str(tuner.best)
    ('dp8', 'dp8.z3', 'dp8')
    """

    model: Model | str
    cluster: Cluster | str
    _: KW_ONLY
    global_batch: int
    sequence: int | None = None
    dtype: str = "bf16"
    plans: Iterable[Plan | str] | pd.DataFrame | None = None
    software: str | Software | None = None
    parameters: Parameters | None = None
    seed: int = 0
    state: str | Path | None = None

    def __post_init__(self):
        constants = constants_of(self.cluster, self.parameters)
        self.parameters = require_type("parameters", constants, Parameters, shipped)
        if self.software is None:
            self.software = self.parameters.software
        self._case = Case.of_step(
            self.model,
            self.cluster,
            Plan(),
            self.global_batch,
            self.sequence,
            self.dtype,
            self.software,
        )
        self.seed = require_int("seed", self.seed)
        self._plans: dict[str, Plan] = {}  # by their texts
        self._results: list[tuple[str, float]] = []  # text, seconds or NaN
        self._asked: list[str] = []  # texts of plans that are being tried
        self._add(self._searched() if self.plans is None else _listed(self.plans))
        if not np.isfinite(self._candidates.log_s).any():
            raise ValueError(
                f"plans: none can be laid out; the first: {self._reasons[0]}"
            )
        if self.state is not None:
            self.state = Path(require_type("state", self.state, str | Path))
            if self.state.exists():
                for text, step_s, why in _read(self.state, self._digest):
                    seconds = math.nan if step_s is None else step_s
                    self._record(Plan.parse(text), seconds, why)

    def ask(self) -> Plan:
        """The plan to measure next, another one each time, also before it was told of
        the last ones.

        Raises ValueError when every plan was asked for or told.
        """
        left = self._left()
        if not left:
            raise ValueError(
                "every plan that can run was asked for or told; the tuning is done"
            )
        believed = self._beliefs()
        # where no draw won, the plan most likely to run and to be fast
        hope = np.log(np.maximum(believed.runs, 1e-300)) - believed.log_s

        def promise(text):
            number = self._places[text]
            return believed.wins[number], hope[number]

        text = max(left, key=promise)
        self._asked.append(text)
        return self._plans[text]

    def tell(
        self, plan: Plan | str, step_s: float | None = None, reason: str = ""
    ) -> None:
        """Add a trial of a plan: seconds of a step, or None (or NaN) if it failed or ran
        out of memory. reason: of a failure; one that names memory teaches what fits,
        another one does not, and without any either may be.

        A plan need not have been asked for, or be among those to choose from. Several
        trials of one plan all count. Raises ValueError for a plan that breaks a rule,
        or seconds that are no positive number.
        """
        seconds = math.nan if step_s is None else step_s
        has_failed = seconds != seconds
        if not has_failed and not is_number(seconds, _LEAST_S):
            raise ValueError(
                f"step_s={short_repr(step_s)} must be seconds above 0, or None for a plan "
                "that failed"
            )
        self._record(Plan.parse(plan), float(seconds), reason)
        if self.state is None:
            return
        case = self._case
        content = {
            # for people; the digest alone decides
            "model": case.model.name,
            "cluster": case.cluster.name,
            "global_batch": case.global_batch,
            "sha256": self._digest,
            # JSON has no NaN
            "told": [
                [
                    text,
                    None if math.isnan(seconds) else seconds,
                    *filter(None, [reason]),
                ]
                for text, seconds, reason in self._results
            ],
        }
        write_text(self.state, json.dumps(content, indent=1) + "\n")

    @property
    def left(self) -> int:
        """Plans that can be asked for."""
        return len(self._left())

    @property
    def best(self) -> Plan:
        """The fastest plan that was measured, by the mean of its trials. Raises
        ValueError if none was.
        """
        means = self.trials.groupby("plan", sort=False)["step_s"].mean().dropna()
        if means.empty:
            raise ValueError(f"no plan has run in {len(self._results)} trials")
        return self._plans[means.idxmin()]

    @property
    def trials(self) -> pd.DataFrame:
        """Trials in order: plan (text), step_s (NaN for a failure), reason (of a
        failure), best_s (of the trials so far).
        """
        table = pd.DataFrame(self._results, columns=["plan", "step_s", "reason"])
        table["step_s"] = table["step_s"].astype(float)  # also of no trial
        return table.assign(best_s=table["step_s"].cummin().ffill())

    @property
    def table(self) -> pd.DataFrame:
        """All plans, those with the best chance to win first, then by their seconds.

        plan (text), simulated_s (before any trial), step_s, low_s, high_s (after them,
        with 90 % interval), measured_s (mean of its trials, NaN for none), failures
        (trials that failed), memory_share (simulated, of what a device has), fits
        (probability to run), wins (probability to be within 5 % of the best and faster
        than all trials), improvement_s (seconds by which it is expected to be faster
        than the best trial, NaN before one ran), reason (the rule that it breaks, else
        empty).
        """
        believed = self._beliefs()
        trials = self.trials.groupby("plan")["step_s"]
        # count leaves NaN out, size does not
        failures = trials.size() - trials.count()
        plans = pd.Series(list(self._plans))
        seconds = np.exp(believed.log_s)
        factor = np.exp(believed.width)
        table = pd.DataFrame(
            {
                "plan": plans,
                "simulated_s": np.exp(self._candidates.log_s),
                "step_s": seconds,
                "low_s": seconds / factor,
                "high_s": seconds * factor,
                "measured_s": plans.map(trials.mean()),
                "failures": plans.map(failures).fillna(0).astype(int),
                "memory_share": np.exp(-self._candidates.log_room),
                "fits": believed.runs,
                "wins": believed.wins,
                "improvement_s": believed.improvement_s,
                "reason": self._reasons,
            }
        )
        return table.sort_values(
            ["wins", "step_s"],
            ascending=[False, True],
            kind="stable",
            ignore_index=True,
        )

    @property
    def _digest(self):
        # of a software the name: what is known of it grows
        about = repr(replace(self._case, plan=Plan(), software=None))
        about += getattr(self._case.software, "name", "none")
        return hashlib.sha256(about.encode()).hexdigest()

    def _left(self):
        tried = {text for text, *_ in self._results} | set(self._asked)
        reasons = zip(self._plans, self._reasons, strict=True)
        return [text for text, reason in reasons if not reason and text not in tried]

    def _record(self, plan, seconds, why):
        text = str(plan)
        if text not in self._plans:
            check_plan(replace(self._case, plan=plan, software=None))
            self._add([plan])
        if reason := self._reasons[self._places[text]]:
            raise ValueError(f"plan {text}: {reason}")
        self._results.append((text, seconds, why))
        self._asked = [other for other in self._asked if other != text]

    def _add(self, plans):
        """More plans to choose from, with what the simulator says of them."""
        self._plans |= {str(plan): plan for plan in plans}
        self._places = {text: number for number, text in enumerate(self._plans)}
        columns = pd.DataFrame([vars(plan) for plan in self._plans.values()])
        case = replace(self._case, plan=Plans.from_table(columns))
        self._candidates, self._reasons = _candidates(case, columns, self.parameters)

    def _beliefs(self):
        trials = self.trials
        tried = trials["plan"].map(self._places).to_numpy(int)
        asked = np.array([self._places[text] for text in self._asked], int)
        log_s = np.log(trials["step_s"].to_numpy())
        # 1 for failures that memory explains, 0 for others, NaN where nobody knows
        of_memory = trials["reason"].str.contains("memory", case=False).astype(float)
        of_memory = of_memory.where(trials["reason"] != "").to_numpy()
        return beliefs(self._candidates, tried, log_s, asked, self.seed, of_memory)

    def _searched(self):
        case = self._case
        result = search(
            case.model,
            case.cluster,
            global_batch=case.global_batch,
            sequence=case.sequence,
            dtype=case.dtype,
            software=case.software,
            parameters=self.parameters,
            space=Space.quick(),
            top=_TOP,
            progress=False,
        )
        return _listed(result.table)


def _listed(plans):
    """Plans of a list or a table, each once."""
    if not isinstance(plans, str | Plan | pd.DataFrame):
        plans = list(require_type("plans", plans, Iterable))
    columns, index = plans_of(plans)
    if index is None:
        return [columns]
    if not len(index):
        raise ValueError("plans: empty")
    # equal plans with different texts are one
    return list(dict.fromkeys(Plan(**vars(columns[row])) for row in range(len(index))))


def _candidates(case, columns, parameters):
    """Candidates as the simulator sees them, and why a plan cannot be laid out, else
    empty.
    """
    table = case.answer(estimate, plan=columns, parameters=parameters, fits=True)
    shares = table[list(PARTS)].to_numpy() / table[["step_s"]].to_numpy()
    usable = usable_bytes(case.device)
    log_room = np.log(usable / table["memory_bytes"].to_numpy())
    # memory is not known where states leave the device; whether they can is
    leaving = np.where(table["fits"], _ROOMY, -_ROOMY)
    log_room = np.where(np.isnan(log_room), leaving, log_room)
    log_s = np.log(table["step_s"].to_numpy())
    width = np.log(table["high_s"] / table["low_s"]).to_numpy() / 2
    refused = table.get("reason", pd.Series("", table.index))
    words = legal(case).words()
    reasons = [rule or reason for rule, reason in zip(words, refused, strict=True)]
    features = _features(case, columns)
    # plans that break a rule have no shares
    shares = np.nan_to_num(shares)
    return Candidates(log_s, log_room, features, shares, width), reasons


def _features(case, columns):
    """Features in which plans are alike: doublings of degrees and batches, and choices
    as numbers.
    """
    # tp leaves the node where cp has filled it
    inside = np.maximum(case.cluster.devices_per_node // columns["cp"], 1)
    counts = columns[
        ["dp", "tp", "pp", "cp", "ep", "micro_batch", "interleave"]
    ].assign(
        micro_batches=case.micro_batches,
        beyond_node=np.maximum(columns["tp"] / inside, 1),
    )
    choices = pd.DataFrame(
        {
            "zero": columns["zero"] > 0,
            "zero_3": columns["zero"] > 2,
            "tp": columns["tp"] > 1,
        }
    )
    choices["recompute"] = columns["recompute"].map({"none": 0, "full": 2}).fillna(1)
    choices["sequence_parallel"] = columns["sequence_parallel"] & (columns["tp"] > 1)
    choices["offload"] = columns["offload"].notna()
    choices["schedule"] = columns["schedule"] == "1f1b"
    return np.hstack(
        [np.log2(counts.to_numpy(float)), _CHOICE * choices.to_numpy(float)]
    )


def _read(path, digest):
    """Trials in a file: text of the plan, seconds or None, and why it failed."""
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        # an earlier version kept no reasons
        trials = [
            (str(text), step_s, "".join(why)) for text, step_s, *why in state["told"]
        ]
        file_digest = state["sha256"]
        for _, step_s, _ in trials:
            if step_s is not None and not is_number(step_s, _LEAST_S):
                raise ValueError(f"{short_repr(step_s)} is not a time above 0")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{path} is not a tuning state ({error!r}); remove it to start over"
        ) from None
    if file_digest != digest:
        raise ValueError(f"{path} holds the tuning of another case; give another file")
    return trials
