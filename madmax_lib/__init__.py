"""MAD-Max Workbench: run, trace, calibrate, simulate and plan distributed training.

The names below are all a notebook needs; each is imported from its room when it is first used, so that importing the
package stays light (no torch, hta, matplotlib, dask or widgets).
"""

from importlib import import_module

__version__ = "0.1.0"

_PUBLIC = {
    "Plan": "plan",
    "RunSpec": "runs.spec",
    "Timeline": "timeline",
    "breakdown": "accounting",
    "cluster": "catalog",
    "clusters": "catalog",
    "compare": "traces.diff",
    "dataset": "datasets",
    "estimate": "simulator.estimate",
    "export_trace": "traces.export",
    "fits": "simulator.fits",
    "largest_model": "simulator.largest",
    "launch": "runs.launch",
    "memory": "simulator.memory",
    "model": "catalog",
    "models": "catalog",
    "plot_timeline": "view.plots",
    "read_trace": "traces.kineto",
    "save_figure": "view.notebook",
    "search": "planner.search",
    "setup": "view.notebook",
    "simulate": "simulator.simulate",
    "view_in_perfetto": "view.perfetto",
    "view_timeline": "view.widgets",
}
__all__ = list(_PUBLIC)


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)


def __dir__():
    return sorted([*globals(), *_PUBLIC])
