from madmax_lib.calibration.published.run_rows import (
    memory_table as memory_table,
    trace_breakdowns as trace_breakdowns,
)
from madmax_lib.view.explore.live import Live as Live
from madmax_lib.view.explore.step_explorer import (
    SpaceExplorer as SpaceExplorer,
    StepExplorer as StepExplorer,
)
from madmax_lib.view.explore.trace_explorer import TraceExplorer as TraceExplorer
from madmax_lib.view.explore.widgets import view_timeline as view_timeline
from madmax_lib.view.notebooks.runner import run_notebook as run_notebook
from madmax_lib.view.notebooks.setup import *
from madmax_lib.view.plots.breakdown import (
    plot_breakdown as plot_breakdown,
    plot_exposed as plot_exposed,
    plot_overlap as plot_overlap,
    plot_timeline as plot_timeline,
    plot_waiting as plot_waiting,
)
from madmax_lib.view.plots.comm import *
from madmax_lib.view.plots.diff import *
from madmax_lib.view.plots.fits import *
from madmax_lib.view.plots.kernels import *
from madmax_lib.view.plots.launch import *
from madmax_lib.view.plots.memory import *
from madmax_lib.view.plots.operators import *
from madmax_lib.view.plots.path import *
from madmax_lib.view.plots.plans import *
from madmax_lib.view.plots.predicted import *
from madmax_lib.view.plots.runs import *
from madmax_lib.view.report.report import (
    report as report,
    write_report as write_report,
)
