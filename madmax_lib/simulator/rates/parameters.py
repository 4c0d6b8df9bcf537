"""Named constants of the step-time model, fitted or ideal: the share of the data sheet
that a machine reaches.

`data/parameter_bounds.csv` lists every constant with start value, bounds, prior width
and its value on an ideal machine; `data/parameters.json` holds the fitted ones with 90
% intervals, covariance and the hash of their rows. A constant of a group is named
`name:group`, such as `gemm_efficiency:hopper-8`.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache, partial
from numbers import Real
from pathlib import Path

import numpy as np
import pandas as pd

from madmax_lib import catalog
from madmax_lib.base import is_number, require_type, short_repr
from madmax_lib.base.atomic import replacing
from madmax_lib.catalog import Software
from madmax_lib.catalog.measured_collectives import MeasuredCollectives

_mapping = partial(
    field, default_factory=dict, hash=False
)  # a field, empty unless given
_SIGMAS = 1.645  # from the middle of a normal distribution to the ends of its 90 %
_DIGITS = 6  # of a number in a file
# constants of files from before products were measured on these devices
_RETIRED = ("device_rate:b200", "device_rate:gb200", "device_rate:l40s")
_SHARES = ("compute_efficiency", "memory_efficiency", "network_efficiency")


@dataclass(frozen=True)
class Parameters:
    """Constants of the step-time model. Raises ValueError for a share outside (0, 1] or
    an unknown constant.

        slow = Parameters(network_efficiency=0.5)
        mm.estimate("gpt2", "dgx-h100", "dp8", global_batch=64, parameters=slow)
    """

    # shares (0..1] of the data sheet that all rates of a kind reach
    compute_efficiency: float = 1.0
    memory_efficiency: float = 1.0
    network_efficiency: float = 1.0
    # by `name:group`; others are ideal
    constants: Mapping[str, float] = _mapping()
    # 90 %, of those fitted
    intervals: Mapping[str, tuple[float, float]] = _mapping()
    fitted: tuple[str, ...] = ()  # names of the fitted constants
    # (n, n) in order of `fitted`, each in its scale (log or linear)
    covariance: tuple[tuple[float, ...], ...] = ()
    # how log(measured / predicted) of sources that the fit has not seen spreads: the
    # components of `step.uncertainty`,
    # and the 90 % half-widths "layouts dense" and "layouts mixture" of one plan over
    # another
    residuals: Mapping[str, float] = _mapping()
    # by name of a constant without its group and by part of the step: how much of a
    # relative change of the constant
    # (log scale; its value where the scale is linear) a step feels that consists of
    # this part
    sensitivities: Mapping[str, Mapping[str, float]] = _mapping()
    # measured seconds of collectives in place of the formulas, by kind and group: see
    # `MeasuredCollectives`
    collectives: Mapping[str, tuple[tuple[float, float], ...]] = _mapping()
    # bytes/s of the links that these were measured on, inside a node and of a device's
    # share of the network; on others
    # they are scaled as the formulas are. () where they hold for whatever links a
    # cluster has
    links: tuple[float, ...] = ()
    # rows, sha256 of the data and figures of the fit; scale: devices and tokens of most
    # rows, by device family
    provenance: Mapping[str, object] = _mapping()

    def __repr__(self):
        return (
            f"Parameters({len(self.fitted)} fitted constants of "
            f"{self.provenance.get('rows', 'no')} rows)"
        )

    def __post_init__(self):
        for name in _SHARES:
            if not (is_number(value := getattr(self, name)) and 0 < value <= 1):
                raise ValueError(f"{name}={short_repr(value)} is not in (0, 1]")
        require_type("constants", self.constants, Mapping)
        are_rates = all(is_number(rate) and rate > 0 for rate in self.links)
        if self.links and not (len(self.links) == 2 and are_rates):
            raise ValueError(
                f"links={short_repr(self.links)} must be two positive rates in bytes/s, "
                "or none"
            )
        for name, value in self.constants.items():
            # arrays: many machines at once
            is_number_or_array = isinstance(value, Real | np.ndarray)
            if not is_number_or_array or np.any(value != value):  # NaN
                raise ValueError(
                    f"constant {name!r} is {short_repr(value)}, but must be a number"
                )
        if unknown := set(self.constants) - set(bounds().index):
            raise ValueError(
                f"constant {sorted(unknown)[0]!r} is not in data/parameter_bounds.csv"
            )
        object.__setattr__(
            self, "constants", {**bounds()["ideal"].to_dict(), **self.constants}
        )

    @property
    def software(self) -> str | Software | None:
        """Software of the runs that they were fitted to, where it was one alone; a step
        without another has it.
        """
        name = self.provenance.get("software")
        like = self.provenance.get("like")
        return catalog.software(name, like) if like else name

    @cached_property
    def uncertainty(self) -> tuple[dict[str, int], np.ndarray]:
        """Row of each constant, and the covariance of all in their fitting scale.

        A constant that is not fitted is as uncertain as its interval, else as its
        prior; none whose bounds fix it.
        """
        table = bounds()
        index = {name: number for number, name in enumerate(table.index)}
        width = np.where(table["low"] < table["high"], table["sigma"], 0.0)
        for name, ends in self.intervals.items():
            low, high = np.log(ends) if table.at[name, "scale"] == "log" else ends
            width[index[name]] = (high - low) / (2 * _SIGMAS)
        covariance = np.diag(width**2)
        if self.covariance:
            fitted = [index[name] for name in self.fitted]
            covariance[np.ix_(fitted, fitted)] = self.covariance
        return index, covariance

    @cached_property
    def slopes(self) -> tuple[list[str], np.ndarray]:
        """Parts of a step that sensitivities name, and these as (constants, parts)."""
        parts = sorted(set().union(*self.sensitivities.values()))
        rows = self.sensitivities.values()
        slopes = [[row.get(part, 0.0) for part in parts] for row in rows]
        return parts, np.array(slopes)


@lru_cache(maxsize=1)
def bounds() -> pd.DataFrame:
    """The table of constants: start low high sigma ideal scale note, indexed by
    `name:group`.
    """
    table = catalog.table("parameter_bounds")
    table = table.astype(
        dict.fromkeys(("start", "low", "high", "sigma", "ideal"), float)
    )
    group = table["group"].where(table["group"] == "", ":" + table["group"])
    return table.set_index(table["name"] + group)


def start() -> Parameters:
    """The start values of the fit, before any row was seen."""
    return Parameters(constants=bounds()["start"].to_dict())


@lru_cache(maxsize=1)
def shipped() -> Parameters:
    """The constants fitted to the published rows (`data/parameters.json`), start values
    for those not fitted.
    """
    return load(Path(str(catalog.data_file("parameters.json"))))


def load(path: str | Path) -> Parameters:
    """Constants from a JSON file. Raises ValueError if it is not one, OSError if it
    cannot be read.
    """
    try:
        return _from_json(json.loads(Path(path).read_text()))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a parameters file ({error})") from None


def _from_json(content):
    """Constants from what `to_json` gave; those that are not in it are at their start
    values.

    Raises ValueError, KeyError or TypeError for other content.
    """
    places = [n for n, name in enumerate(content["fitted"]) if name not in _RETIRED]
    constants, intervals = (
        {name: value for name, value in content[part].items() if name not in _RETIRED}
        for part in ("constants", "intervals")
    )
    # the meaning of shares in files from before there was this constant
    on_paper = {"data_sheet": 1.0}
    read = dict(content) | {"constants": {**start().constants, **on_paper, **constants}}
    read["intervals"] = {name: tuple(pair) for name, pair in intervals.items()}
    covariance = content["covariance"]
    # files of priors alone have none
    read["covariance"] = tuple(
        tuple(covariance[n][m] for m in places) for n in places if covariance
    )
    read["fitted"] = tuple(content["fitted"][n] for n in places)
    groups = content.get("collectives", {}).items()
    columns = ("collective", "ranks", "nodes", "size_bytes", "seconds")
    rows = [
        dict(zip(columns, (*name.split(), *point), strict=False))
        for name, points in groups
        for point in points
    ]
    read["collectives"] = {}
    if rows:
        table = pd.DataFrame(rows, columns=columns)
        read["collectives"] = MeasuredCollectives(table).curves
    read["links"] = tuple(content.get("links", ()))
    return Parameters(**read)


def to_json(parameters: Parameters) -> dict:
    """All fields, numbers with the digits that matter."""
    return _short({f.name: getattr(parameters, f.name) for f in fields(Parameters)})


def save(parameters: Parameters, path: str | Path) -> None:
    """Constants to a JSON file, complete or not at all."""
    text = json.dumps(to_json(parameters), indent=1)
    # a row of numbers on a line
    text = re.sub(r"\[[^\[\]{}]*\]", lambda row: " ".join(row[0].split()), text)
    with replacing(path) as temporary:
        temporary.write_text(text + "\n")


def _short(value):
    """The same with the digits that matter."""
    if isinstance(value, Mapping):
        return {name: _short(part) for name, part in sorted(value.items())}
    if isinstance(value, (tuple, list)):
        return [_short(part) for part in value]
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


def constants_of(cluster, parameters: Parameters | None = None) -> Parameters | None:
    """The constants that are given; if none are, those in the `machine.json` of a
    calibration that names the cluster.

    Raises ValueError for another file, FileNotFoundError without one.
    """
    is_path = isinstance(cluster, str | Path)
    if parameters is not None or not (is_path and str(cluster).endswith(".json")):
        return parameters
    catalog.cluster(cluster)
    try:
        return _from_json(json.loads(Path(cluster).read_text())["parameters"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{cluster}: not a machine file ({error})") from None


def software_of(software, parameters: Parameters | None):
    """Who trains: the software that is named, else that of the parameters, if they are
    of one.
    """
    return getattr(parameters, "software", None) if software is None else software
