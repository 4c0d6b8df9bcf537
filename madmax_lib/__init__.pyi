from madmax_lib import (
    calibration as calibration,
    papers as papers,
    planner as planner,
    runs as runs,
    simulator as simulator,
    traces as traces,
    view as view,
)
from madmax_lib.calibration.machine.calibrate import calibrate as calibrate
from madmax_lib.calibration.machine.machine import machine as machine
from madmax_lib.calibration.trace import fit_timeline as fit_timeline
from madmax_lib.calibration.verdict.expect import expect as expect
from madmax_lib.catalog.datasets import dataset as dataset
from madmax_lib.catalog.flops import flops as flops
from madmax_lib.catalog.hardware import (
    Cluster as Cluster,
    Device as Device,
    Link as Link,
)
from madmax_lib.catalog.listing import (
    clusters as clusters,
    devices as devices,
    models as models,
    software as software,
)
from madmax_lib.catalog.models import Transformer as Transformer
from madmax_lib.catalog.tables import cluster as cluster, model as model
from madmax_lib.plan.case import Case as Case
from madmax_lib.plan.plan import Plan as Plan
from madmax_lib.planner.search import search as search
from madmax_lib.planner.tuner.tune import tune as tune
from madmax_lib.runs.launch import launch as launch
from madmax_lib.runs.spec import RunSpec as RunSpec
from madmax_lib.simulator.estimate import estimate as estimate
from madmax_lib.simulator.memory.memory import memory as memory
from madmax_lib.simulator.offload.fits import (
    fits as fits,
    largest_model as largest_model,
)
from madmax_lib.simulator.simulate import simulate as simulate
from madmax_lib.timeline.timeline import Timeline as Timeline
from madmax_lib.traces.diff import compare as compare
from madmax_lib.traces.export import export_trace as export_trace
from madmax_lib.traces.export_chakra import export_chakra as export_chakra
from madmax_lib.traces.parts import breakdown as breakdown
from madmax_lib.traces.read.kineto import read_trace as read_trace
from madmax_lib.view.explore.widgets import view_timeline as view_timeline
from madmax_lib.view.notebooks.setup import (
    save_figure as save_figure,
    setup as setup,
)
from madmax_lib.view.plots.breakdown import plot_timeline as plot_timeline

__version__: str
