"""Pictures with controls: static where nobody can turn them, drawn again where one can."""

import pytest
from matplotlib import pyplot as plt

from madmax_lib.view import Live

widgets = pytest.importorskip("ipywidgets")


def draw(power, scale):
    if power == 3:
        raise ValueError("power 3 cannot be drawn")
    _, ax = plt.subplots()
    ax.plot([0, 1, 2], [scale * x**power for x in range(3)])
    return ax


def test_the_picture_is_that_of_the_first_values():
    line = Live(draw, power=[1, 2], scale=(5, 7)).figure().axes[0].lines[0]
    assert line.get_ydata().tolist() == [0, 5, 10]


def test_a_control_draws_anew_and_says_what_it_cannot():
    live = Live(draw, power=[1, 2, 3], scale=[1])
    controls, message, picture = live.widget.children
    power = controls.children[0]
    first = bytes(picture.value)
    assert first.startswith(b"\x89PNG") and not message.value
    power.value = 2
    second = bytes(picture.value)
    assert second != first
    power.value = 3
    assert bytes(picture.value) == second and "power 3 cannot be drawn" in message.value
    assert live.values == {"power": 2, "scale": 1}


def test_headless_runs_have_a_picture_only(monkeypatch):
    monkeypatch.setenv("MADMAX_FIGURE_LOG", "log")
    bundle, _ = Live(draw, power=[1], scale=[1])._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "image/png"}
