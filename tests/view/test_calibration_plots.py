"""Pictures of a fit show what their tables say."""

import numpy as np
import pandas as pd

from madmax_lib.calibration.identifiability import constants_of, correlations
from madmax_lib.simulator.rates.parameters import bounds, shipped
from madmax_lib.view.drawing import figure_data
from madmax_lib.view.plots import fits


def rows_of(ax):
    return [label.get_text() for label in ax.get_yticklabels()]


def test_constants():
    ax = fits.plot_constants(constants_of(shipped()), bounds()["sigma"])
    assert figure_data(ax)["constant"].tolist() == list(shipped().fitted) == rows_of(ax)


def test_residuals():
    table = pd.DataFrame({"source": list("aabb"), "model": "m", "gpu": ["h100", "a100"] * 2, "family": "hopper"})
    table = table.assign(predicted_s=[1.0, 2.0, 3.0, 4.0], log_error=np.log([1.0, 1.05, 1.5, 1.3]))
    assert figure_data(fits.plot_residuals(table))["predicted_s"].tolist() == [1, 2, 3, 4]
    assert rows_of(fits.plot_spread(table, "source")) == ["b (2)", "a (2)"]


def test_correlations():
    matrix = correlations(shipped())
    shown = figure_data(fits.plot_correlations(matrix))
    pairs = matrix.where(np.triu(np.ones(matrix.shape, bool), 1)).abs().stack()
    assert set(shown["constant"]) == {name for pair in pairs[pairs >= 0.4].index for name in pair}


def test_errors():
    table = pd.DataFrame({"rows": [1, 5], "mape": [0.1, 0.2]}, index=["a100", "b300"])
    assert rows_of(fits.plot_errors(table)) == ["b300 (5 runs)", "a100 (1 run)"]
    beside = fits.plot_errors(table, baseline=pd.Series({"a100": 0.3, "b300": 0.1}))
    assert figure_data(beside)["baseline"].tolist() == [0.1, 0.3]
