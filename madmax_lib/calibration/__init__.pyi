from madmax_lib.calibration import fit as fit
from madmax_lib.calibration.fit import known_rows as known_rows, usable as usable
from madmax_lib.calibration.job.another_plan import (
    another_plan as another_plan,
    case_of as case_of,
)
from madmax_lib.calibration.judge.intervals import *
from madmax_lib.calibration.judge.intervals import (
    class_of as class_of,
    constants_of as constants_of,
    determined_by as determined_by,
    level as level,
    spread as spread,
    weighted_quantile as weighted_quantile,
    with_errors as with_errors,
)
from madmax_lib.calibration.kernels.fit import (
    fit_rates as fit_rates,
    held_out as held_out,
    kernel_errors as kernel_errors,
)
from madmax_lib.calibration.kernels.tables import read_kernels as read_kernels
from madmax_lib.calibration.machine.calibrate import calibrate as calibrate
from madmax_lib.calibration.machine.compared import (
    compared as compared,
    predicted as predicted,
)
from madmax_lib.calibration.machine.machine import (
    Machine as Machine,
    machine as machine,
)
from madmax_lib.calibration.published.link_logs import (
    read_link_log as read_link_log,
)
from madmax_lib.calibration.published.rows import (
    read_rows as read_rows,
    to_steps as to_steps,
)
from madmax_lib.calibration.published.run_rows import run_rows as run_rows
from madmax_lib.calibration.scale import FittingScale as FittingScale
from madmax_lib.calibration.trace import (
    fit_timeline as fit_timeline,
    kernel_seconds as kernel_seconds,
)
from madmax_lib.calibration.verdict.accuracy import *
from madmax_lib.calibration.verdict.expect import (
    expect as expect,
    verdicts as verdicts,
)
from madmax_lib.calibration.verdict.overlap import overlap_facts as overlap_facts
