from madmax_lib.runs import testbed as testbed
from madmax_lib.runs.launch import (
    RunError as RunError,
    gpu_count as gpu_count,
    launch as launch,
    launch_all as launch_all,
    measure_links as measure_links,
    prepare as prepare,
    sweep as sweep,
)
from madmax_lib.runs.measure.bench import bench as bench, timing as timing
from madmax_lib.runs.measure.peak_rates import device_name as device_name
from madmax_lib.runs.parallel.trainer import parallelize as parallelize
from madmax_lib.runs.read import (
    read_run as read_run,
    read_runs as read_runs,
    runs_table as runs_table,
)
from madmax_lib.runs.ready import *
from madmax_lib.runs.record import Recorder as Recorder
from madmax_lib.runs.spec import RunSpec as RunSpec
from madmax_lib.runs.summary import (
    PROFILED as PROFILED,
    counted_steps as counted_steps,
)
