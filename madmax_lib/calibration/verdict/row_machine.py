"""Calibration by rows that somebody measured: constants of an own stack, and a page of
how well each row is foretold by the others.
"""

import math
from dataclasses import replace
from pathlib import Path

import pandas as pd

from madmax_lib.calibration.fit import update
from madmax_lib.calibration.judge.intervals import predict
from madmax_lib.calibration.machine.machine import Machine
from madmax_lib.calibration.machine.machine_page import write_page
from madmax_lib.calibration.published.rows import read_rows, to_table
from madmax_lib.simulator import shipped

_MOVED = 0.01  # relative change of a constant that the page shows


def calibrate_rows(
    rows: pd.DataFrame | str | Path, directory: str | Path, like: str | None = None
) -> Machine:
    """The machine of measured rows, in `directory` as `calibrate` writes it.

    rows: as in `fit.update`. like: software that the rows' is built on, None where it is
    none that is known. The cluster is that of the row with most devices. results.csv
    has a row predicted by the others (NaN where there are none), parts.csv the rows by
    the constants that all gave. Raises ValueError for rows that cannot be used, OSError.

    >>> calibrate_rows("my_runs.csv", "machine").parameters       # doctest: +SKIP
    """
    table = to_table(rows).reset_index(drop=True)
    table = table.assign(like=like) if like else table
    read = read_rows(table)
    parameters = update(read)
    alone = []
    for row in table.index:
        others = read.drop(index=row)
        blind = update(others) if len(others) else parameters
        alone.append(predict(table.loc[[row]], blind))
    results = pd.concat(alone)[["predicted_s", "low_s", "high_s"]]
    if len(table) == 1:  # foretold by none
        results[:] = math.nan
    cases = read["case"]
    names = [f"{case.model.name} {case.plan}, {case.global_batch}" for case in cases]
    results = results.assign(
        measured_s=read["measured_s"],
        error=results["predicted_s"] / read["measured_s"] - 1,
    )
    parts = pd.DataFrame(
        {
            "predicted_step_s": predict(table, parameters)["predicted_s"],
            "measured_step_s": read["measured_s"],
        }
    )
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    for name, columns in {"results": results, "parts": parts}.items():
        columns.index = pd.Index(names, name="run")
        columns.to_csv(directory / f"{name}.csv", float_format="%.6g")
    machine = _machine(cases, parameters).judged(results)
    machine.save(directory / "machine.json")
    write_page(directory, machine)
    return machine


def _machine(cases, parameters):
    """The largest of the rows' clusters, with the constants and their software."""
    largest = max(cases, key=lambda case: case.plan.world_size)
    before = shipped().constants
    moved = [
        name
        for name in parameters.fitted
        if abs(parameters.constants[name] / before[name] - 1) > _MOVED
    ]
    stacks = {case.software.name: case.software for case in cases}
    facts = dict(parameters.provenance)
    if len(stacks) == 1 and "none" not in stacks:
        facts |= {"software": largest.software.name, "like": largest.software.rates}
    notes = [facts["update"]["note"]] if "note" in facts["update"] else []
    return Machine(
        largest.cluster,
        replace(parameters, provenance=facts),
        largest.dtype,
        {"rows": len(cases), "moved": moved, "notes": notes},
    )
