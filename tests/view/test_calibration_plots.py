"""Pictures of a fit show what their tables say."""

import pandas as pd

from madmax_lib.calibration.judge.intervals import constants_of
from madmax_lib.simulator.rates.parameters import bounds, shipped
from madmax_lib.view.drawing import figure_data
from madmax_lib.view.plots import fits


def rows_of(ax):
    return [label.get_text() for label in ax.get_yticklabels()]


def test_constants():
    ax = fits.plot_constants(constants_of(shipped()), bounds()["sigma"])
    names = [row.partition(": ")[0] for row in rows_of(ax)]
    assert figure_data(ax)["constant"].tolist() == list(shipped().fitted) == names


def test_errors():
    table = pd.DataFrame({"rows": [1, 5], "mape": [0.1, 0.2]}, index=["a100", "b300"])
    assert rows_of(fits.plot_errors(table)) == ["b300 (5 runs)", "a100 (1 run)"]
    beside = fits.plot_errors(table, baseline=pd.Series({"a100": 0.3, "b300": 0.1}))
    assert figure_data(beside)["baseline"].tolist() == [0.1, 0.3]
