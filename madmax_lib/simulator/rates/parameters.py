"""Which share of the data sheet does a machine reach? Named constants of the step-time model, fitted or ideal.

`data/parameter_bounds.csv` lists every constant with start value, bounds, prior width and its value on an ideal
machine; `data/parameters.json` holds the fitted ones with 90 % intervals, covariance and the hash of their rows.
A constant of a group is named `name:group`, such as `gemm_efficiency:hopper-8`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import pandas as pd

from madmax_lib import catalog
from madmax_lib.atomic import replacing

__all__ = ["Parameters", "bounds", "load", "save", "shipped", "start"]

_SHARES = ("compute_efficiency", "memory_efficiency", "network_efficiency")


@dataclass(frozen=True)
class Parameters:
    """Constants of the step-time model. Raises ValueError for a share outside (0, 1] or an unknown constant.

    compute_efficiency, memory_efficiency, network_efficiency: shares (0..1] of the data sheet that all rates of that
        kind reach; default 1.
    constants: values by `name:group`; those not given are the ideal machine's.
    intervals: 90 % (low, high) of the fitted constants; empty without a fit.
    fitted: names of the fitted constants.
    covariance: (n, n) of the fitted constants, each in its fitting scale (log or linear), in order of `fitted`.
    residuals: 90 % (low, high) of log(measured / predicted) by kind of step, of rows that the fit has not seen.
    provenance: rows, sha256 of the data and figures of the fit.
    """

    compute_efficiency: float = 1.0
    memory_efficiency: float = 1.0
    network_efficiency: float = 1.0
    constants: Mapping[str, float] = field(default_factory=dict, hash=False)
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict, hash=False)
    fitted: tuple[str, ...] = ()
    covariance: tuple[tuple[float, ...], ...] = ()
    residuals: Mapping[str, list] = field(default_factory=dict, hash=False)
    provenance: Mapping[str, object] = field(default_factory=dict, hash=False)

    def __post_init__(self):
        for name in _SHARES:
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} is not in (0, 1]")
        if unknown := set(self.constants) - set(bounds().index):
            raise ValueError(f"constant {sorted(unknown)[0]!r} is not in data/parameter_bounds.csv")
        object.__setattr__(self, "constants", {**_ideal_values(), **self.constants})


@lru_cache(maxsize=1)
def bounds() -> pd.DataFrame:
    """The table of constants: start low high sigma ideal scale note, indexed by `name:group`."""
    table = catalog.table("parameter_bounds")
    table = table.astype(dict.fromkeys(("start", "low", "high", "sigma", "ideal"), float))
    group = table["group"].where(table["group"] == "", ":" + table["group"])
    return table.set_index(table["name"] + group)


@lru_cache(maxsize=1)
def _ideal_values() -> dict[str, float]:
    """Every constant on an ideal machine."""
    return {name: float(value) for name, value in bounds()["ideal"].items()}


def start() -> Parameters:
    """The start values of the fit, before any row was seen."""
    return Parameters(constants={name: float(value) for name, value in bounds()["start"].items()})


@lru_cache(maxsize=1)
def shipped() -> Parameters:
    """The constants fitted to the published rows (`data/parameters.json`), start values for those not fitted."""
    return load(Path(str(catalog.data_file("parameters.json"))))


def load(path: str | Path) -> Parameters:
    """Constants from a JSON file. Raises ValueError if it is not one, OSError if it cannot be read."""
    try:
        content = json.loads(Path(path).read_text())
        return Parameters(
            **{name: content.get(name, 1.0) for name in _SHARES},
            constants={**start().constants, **content["constants"]},
            intervals={name: tuple(pair) for name, pair in content["intervals"].items()},
            fitted=tuple(content["fitted"]),
            covariance=tuple(tuple(row) for row in content["covariance"]),
            residuals=content.get("residuals", {}),
            provenance=content["provenance"],
        )
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a parameters file ({error})") from None


def save(parameters: Parameters, path: str | Path) -> None:
    """Constants to a JSON file, complete or not at all."""
    content = {
        "constants": {name: _short(value) for name, value in sorted(parameters.constants.items())},
        "intervals": {name: [_short(v) for v in pair] for name, pair in sorted(parameters.intervals.items())},
        "fitted": list(parameters.fitted),
        "covariance": [[_short(v, 4) for v in row] for row in parameters.covariance],
        "residuals": {name: [_short(v, 4) for v in values] for name, values in parameters.residuals.items()},
        "provenance": dict(parameters.provenance),
        **{name: getattr(parameters, name) for name in _SHARES},
    }
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n")


def _short(value: float, digits: int = 6) -> float:
    return float(f"{value:.{digits}g}")
