# of a trace and a simulation together: they stand above both, and are found here
from madmax_lib.calibration.job.another_plan import (
    another_plan as another_plan,
    case_of as case_of,
)
from madmax_lib.traces import hta as hta
from madmax_lib.traces.advise import advise as advise
from madmax_lib.traces.comm.alignment import (
    align as align,
    clock_offsets as clock_offsets,
)
from madmax_lib.traces.comm.collectives import (
    by_group as by_group,
    calls as calls,
    exposed_by_collective as exposed_by_collective,
    waiting as waiting,
)
from madmax_lib.traces.counters import counters as counters
from madmax_lib.traces.critical_path import (
    critical_path as critical_path,
    faster_kinds as faster_kinds,
    launch_gain as launch_gain,
    path_share as path_share,
    what_if as what_if,
)
from madmax_lib.traces.diff import (
    align_ranks as align_ranks,
    align_steps as align_steps,
    compare as compare,
    compare_ops as compare_ops,
    op_names as op_names,
)
from madmax_lib.traces.export import export_trace as export_trace
from madmax_lib.traces.export_chakra import export_chakra as export_chakra
from madmax_lib.traces.forensics.flight_recorder import *
from madmax_lib.traces.forensics.read_snapshots import (
    read_snapshot as read_snapshot,
)
from madmax_lib.traces.forensics.snapshots import *
from madmax_lib.traces.gate import gate as gate
from madmax_lib.traces.logs.compare import compare_logs as compare_logs
from madmax_lib.traces.logs.history import history as history
from madmax_lib.traces.logs.late import find_late as find_late
from madmax_lib.traces.logs.log import Log as Log, step_table as step_table
from madmax_lib.traces.logs.read import find_log as find_log, read_log as read_log
from madmax_lib.traces.operators.memory import (
    allocations as allocations,
    growth as growth,
    held_at_peak as held_at_peak,
    memory_timeline as memory_timeline,
    peak as peak,
)
from madmax_lib.traces.operators.ops import (
    kernels as kernels,
    modules as modules,
    operators as operators,
)
from madmax_lib.traces.operators.roofline import mfu as mfu, roofline as roofline
from madmax_lib.traces.parts import breakdown as breakdown, window as window
from madmax_lib.traces.read.kineto import read_trace as read_trace
from madmax_lib.traces.stragglers import *
from madmax_lib.traces.waits.idle import idle as idle, launch_bound as launch_bound
from madmax_lib.traces.waits.launch import (
    launches as launches,
    queue_length as queue_length,
    queue_series as queue_series,
)
from madmax_lib.traces.waits.operations import operations as operations
from madmax_lib.traces.waits.step_times import (
    counted_steps as counted_steps,
    input_wait as input_wait,
    only_steps as only_steps,
    steady_state as steady_state,
    step_note as step_note,
    step_s as step_s,
    step_summary as step_summary,
    steps as steps,
)
from madmax_lib.traces.waits.without_stragglers import (
    what_if_no_stragglers as what_if_no_stragglers,
)
