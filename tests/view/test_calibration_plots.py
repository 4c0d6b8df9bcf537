"""Pictures of a fit show what their tables say."""

import numpy as np
import pandas as pd

from madmax_lib.calibration.identifiability import constants_of, correlations
from madmax_lib.simulator.rates.parameters import bounds, shipped
from madmax_lib.view.drawing import figure_data
from madmax_lib.view.plots.fits import (
    plot_constants,
    plot_correlations,
    plot_errors,
    plot_residuals,
    plot_spread,
    plot_vision,
)

RESIDUALS = pd.DataFrame({
    "source": ["a", "a", "b", "b"], "model": "m", "gpu": ["h100", "a100", "h100", "a100"], "family": "hopper",
    "predicted_s": [1.0, 2.0, 3.0, 4.0], "log_error": np.log([1.0, 1.05, 1.5, 1.3]),
})  # fmt: skip


def test_constants():
    table = constants_of(shipped())
    ax = plot_constants(table, bounds()["sigma"])
    assert figure_data(ax)["constant"].tolist() == list(shipped().fitted)
    assert ax.get_title().startswith(f"The rows fix {(table['state'] == 'fixed by rows').sum()} of {len(table)}")


def test_residuals():
    ax = plot_residuals(RESIDUALS)
    assert ax.get_title() == "50% of the residuals are within 10 %; of the 2 others 2 are slower"
    assert len(figure_data(ax)) == 4
    by_source = plot_spread(RESIDUALS, "source")
    assert [label.get_text() for label in by_source.get_yticklabels()] == ["b (2)", "a (2)"]
    assert by_source.get_title() == "The median of 1 of 2 sources is off by more than 10 %"
    near = RESIDUALS.assign(log_error=0.01)
    assert plot_spread(near, "gpu").get_title() == "No median of the 2 GPUs is off by more than 10 %"


def test_correlations():
    matrix = correlations(shipped())
    shown = figure_data(plot_correlations(matrix, least=0.6))
    pairs = matrix.where(np.triu(np.ones(matrix.shape, bool), 1)).abs().stack()
    names = set(pairs[pairs >= 0.6].index.get_level_values(0)) | set(pairs[pairs >= 0.6].index.get_level_values(1))
    assert set(shown["constant"]) == names


def test_errors():
    table = pd.DataFrame({"rows": [1, 5], "mape": [0.2, 0.1]}, index=["b300", "a100"])
    alone = plot_errors(table)
    assert alone.get_title() == "Predicted worst: b300, 20% off"
    assert [label.get_text() for label in alone.get_yticklabels()] == ["b300 (1 run)", "a100 (5 runs)"]
    beside = plot_errors(table, baseline=pd.Series({"a100": 0.3, "b300": 0.1}))
    assert beside.get_title() == "Off by 10% to 20%; nearer than one rate in 1 of 2"
    assert figure_data(beside)["baseline"].tolist() == [0.1, 0.3]


def test_vision():
    table = pd.DataFrame({"model": ["ViT-L"], "gpus": [32], "global_batch": [4096], "measured": [0.2], "paper": [0.3],
                          "ours": [0.25], "paper_error": [0.5], "ours_error": [0.25]})  # fmt: skip
    assert plot_vision(table).get_title() == "Vision transformers: off by 25%, the paper's own model by 50%"
