"""Colours, hatching and words that all pictures share: values without axes, with which
`drawing` draws.

Colours mean the same everywhere: compute blue, communication orange, hidden
communication light orange, copies green, other work violet, idle light grey, memory
purple; a number that is none of these, such as a step, is grey. What was measured is
filled, what was simulated is hatched, what others published is hollow.
"""

from collections.abc import Iterable

import pandas as pd
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from madmax_lib.catalog import data_file
from madmax_lib.view.words import COLORS, LABELS, shorten

# of groups in order, such as GPU types: none is the colour of a kind of work
SERIES = ("#2f9c95", "#c44e52", "#c49a2c", "#6a6f86")
SERIES += ("#d387b0", "#937860", "#8a9a3c", "#222222")
# of a number that is no kind of work, from little to much
SHADES = LinearSegmentedColormap.from_list("shades", ["#f2f8f7", SERIES[0], "#123f3c"])
# of memory, the same colour everywhere; neighbours differ in lightness
COMPONENTS = pd.read_csv(data_file("components.csv"), index_col="component")
COMPONENTS = COMPONENTS["color"].to_dict()
GIB = 2**30  # memory is drawn in GiB
_OTHER = "#6b6b6b"  # components that have no colour of their own
GREY = "#b9b9b9"
PLAIN = "#7f7f7f"  # a bar of what has no colour of its own
DARK = "#4a4a4a"
PAPER = "#222222"
_HATCH = "//"
# a limit: the memory of a device, a budget
DASHED = {"color": DARK, "lw": 0.9, "ls": "--"}
# a bar of what does not fit in memory
UNFIT = {"facecolor": "none", "edgecolor": GREY, "linestyle": ":", "linewidth": 1.3}
# a published value as a bar
THEIRS = {"facecolor": "white", "edgecolor": PAPER, "linewidth": 1.0}

Fill = str | dict


def fill_of(fill: Fill, source: str | None = None) -> dict:
    """Patch options of an area: the colour of a kind or any other, hatched where the
    source is "simulated".

    A dictionary of matplotlib's patch options (such as UNFIT, THEIRS) passes as it is.

    >>> fill_of("comm", "simulated")["hatch"], fill_of("#ff0000")["facecolor"]
    ('//', '#ff0000')
    """
    if isinstance(fill, dict):
        return fill
    hatch = _HATCH if source == "simulated" else None
    return {
        "facecolor": COLORS.get(fill, fill),
        "edgecolor": "white",
        "linewidth": 0,
        "hatch": hatch,
    }


def kind_fills(kinds: Iterable[str], source: str | None) -> dict[str, Fill]:
    """Fills of kinds, hatched where simulated."""
    return {kind: fill_of(kind, source) for kind in kinds}


def faded(fill: Fill, source: str | None = None, *, alpha: float = 0.55) -> dict:
    """The same fill, paler: the second of two, or what is beside the point."""
    return fill_of(fill, source) | {"alpha": alpha}


def ink_on(color) -> str:
    """Black or white text, whichever reads better on a colour.

    >>> ink_on("#3b75af"), ink_on("#f4c79a")
    ('white', 'black')
    """
    # relative luminance, without the gamma of sRGB   [ITU-R BT.709]
    red, green, blue = to_rgb(color)
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "white" if luminance < 0.45 else "black"


def kinds_key(kinds: Iterable[str]) -> dict[str, Fill]:
    """Legend entries of those LABELS that are among the kinds."""
    return {label: kind for kind, label in LABELS.items() if kind in set(kinds)}


def components_key(names: Iterable[str]) -> dict[str, Fill]:
    """Legend entries of components of memory, each once."""
    return {name: COMPONENTS.get(name, _OTHER) for name in names}


def patch_key(label: str, fill: Fill, source: str | None = None) -> Patch:
    """A legend entry for an area."""
    return Patch(label=label, **fill_of(fill, source))


def mark_key(label: str, **style) -> Line2D:
    """A legend entry for a mark without a line; by default the hollow diamond of
    published values.
    """
    diamond = {"marker": "D", "color": PAPER, "mfc": "none", "ls": "none"}
    return Line2D([], [], label=label, **diamond | style)


def line_key(label: str, color: str = DARK, **style) -> Line2D:
    """A legend entry for a line."""
    return Line2D([], [], color=color, label=label, **style)


def short_name(name: str) -> str:
    """An operator's name that fits beside a bar.

    >>> short_name("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad")
    'AccumulateGrad'
    >>> short_name("aten::mm")
    'mm'
    """
    name = name.rpartition(": ")[2]  # of an evaluation, the function
    name = name.removeprefix("torch::autograd::").removeprefix("aten::")
    return shorten(name.replace("_scaled_dot_product_", "sdpa_"))
