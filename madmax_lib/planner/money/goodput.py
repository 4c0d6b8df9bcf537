"""Share of a training that makes progress, and how much longer trainings take than their
best plan is predicted to.

Devices fail independently, so a job of N stops every mtbf / N seconds, and loses a
restart and half the time between two checkpoints. Checkpoints are as far apart as loses
least, sqrt(2 x seconds of one x seconds between stops) [Young 1974, doi
10.1145/361147.361115]. The facts are those of Llama 3's 54 days on 16,384 H100 [arXiv
2407.21783, 3.3.4] (`data/goodput.csv`): 466 stops in 54 days, and checkpoints at 2 TB/s.
The paper says only that more than 90 % of the time was effective, evaluation included;
the restart is the longest that agrees with it, of `Goodput.share` solved for it.

What remains between prediction and the bill is plans that were not the best, earlier
attempts and slow weeks. It is known from the device-hours that owners published
(`data/training_totals.csv`), every release counting alike.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import pandas as pd

from madmax_lib import catalog
from madmax_lib.base import require_int, require_number


@lru_cache(maxsize=1)
def _facts():
    return (
        catalog.table("goodput", numbers=True).set_index("quantity")["value"].to_dict()
    )


class _Rhythm(NamedTuple):
    """Seconds in which a job stops and saves."""

    between_s: float  # from one stop to the next
    interval_s: float  # from one checkpoint to the next
    lost_s: float  # by a stop


@dataclass(frozen=True)
class Goodput:
    """Facts of what stops a training, and what it then loses.

        goodput = Goodput(restart_s=600.0)
        goodput.share(16384, 405.85e9)

    mtbf_s: seconds of one device between stops of its job (default None: Llama 3's, 1.6
    x 10^8).
    restart_s: from a stop until the job trains again (default None: the longest that
    agrees with Llama 3's 90 %).
    storage_bytes_per_s: at which a device writes its part of a checkpoint (default
    None: Llama 3's, 1.2 x 10^8).
    evaluation: share of the time that evaluation takes (default None: that of the
    table).

    Raises ValueError for a negative number, or a share of 1 or more.
    """

    mtbf_s: float | None = None
    restart_s: float | None = None
    storage_bytes_per_s: float | None = None
    evaluation: float | None = None

    def __post_init__(self):
        for name, value in vars(self).items():
            if value is None:
                object.__setattr__(self, name, _facts()[name])
            else:
                is_rate = name in ("mtbf_s", "storage_bytes_per_s")
                require_number(name, value, positive=is_rate)
        if not self.evaluation < 1:
            raise ValueError(
                f"evaluation={self.evaluation:g} is a share of the time, below 1"
            )

    def share(self, devices: int, parameters: float) -> float:
        """Share of the wall clock in which a job of so many devices trains a model of
        so many parameters.

        Raises ValueError where it stops faster than it restarts.

        >>> goodput = Goodput(evaluation=0.0)
        >>> round(goodput.share(16384, 405.85e9), 3), goodput.share(1024, 405.85e9) > 0.97
        (0.9, True)
        """
        rhythm = self._rhythm(require_int("devices", devices, 1), parameters)
        if rhythm.lost_s >= rhythm.between_s:
            raise ValueError(
                f"{devices:,} devices stop every {rhythm.between_s:,.0f} s and lose "
                f"{rhythm.lost_s:,.0f} s each time"
            )
        checkpoint_s = self.checkpoint_s(devices, parameters)
        writing = checkpoint_s / rhythm.interval_s if checkpoint_s else 0.0
        trains = 1 - rhythm.lost_s / rhythm.between_s
        return trains * (1 - self.evaluation) / (1 + writing)

    def describe(self, devices: int, parameters: float) -> str:
        """The share, and what is lost, in a line."""
        rhythm = self._rhythm(devices, parameters)
        return (
            f"{self.share(devices, parameters):.1%} of the time trains: a stop every "
            f"{rhythm.between_s / 3600:,.1f} h (by default at the rate per device of "
            f"Llama 3) loses {rhythm.lost_s / 3600:,.2g} h, a checkpoint of "
            f"{self.checkpoint_s(devices, parameters):.2g} s is written every "
            f"{rhythm.interval_s / 3600:,.2g} h, evaluation takes {self.evaluation:.0%}"
        )

    def _rhythm(self, devices, parameters):
        between_s = self.mtbf_s / devices
        checkpoint_s = self.checkpoint_s(devices, parameters)
        interval_s = math.sqrt(2 * checkpoint_s * between_s)  # [Young 1974]
        # a stop falls anywhere between two checkpoints: half of it on average
        return _Rhythm(between_s, interval_s, self.restart_s + interval_s / 2)

    def checkpoint_s(self, devices: int, parameters: float) -> float:
        """Seconds that the job stands still for a checkpoint: each device writes its
        share of the states.
        """
        return _facts()["state"] * parameters / (devices * self.storage_bytes_per_s)


def published_totals() -> pd.DataFrame:
    """Device-hours of trainings as their owners published them, predicted_hours of the
    best launchable plan, and high_over_step, by which the step of that is known (90 %).

    Predictions contain the goodput; `benchmarks/totals.py` works them out again.
    """
    return catalog.table("training_totals", numbers=True)


def practice(left_out: str | None = None) -> tuple[float, float]:
    """Published over predicted device-hours: the median release, and the 90 %
    half-width of its logarithm beyond that of the predicted step.

    left_out: a release that is not counted. The variance of an error e is that of the
    step, of half-width w, and of all else,

        e^2 = w^2 + p^2

    Every release counts alike, by its median p. Of so few the widest sets the width:
    for 90 % inside of a further one, 90 (1 + 1/n) % of n must be [conformal over
    groups, Dunn et al. 2022, arXiv 1809.07441].
    """
    table = published_totals()
    table = table[table["release"] != left_out]
    error = np.log(table["device_hours"] / table["predicted_hours"])
    middle = error.groupby(table["release"]).median().median()
    rest = (error - middle) ** 2 - np.log(table["high_over_step"]) ** 2
    widths = np.sqrt(rest.clip(lower=0)).groupby(table["release"]).median()
    return float(np.exp(middle)), float(widths.max())
