"""`record` of `python -m madmax_lib`: somebody's training script runs as it is, and
some of its steps leave traces, a report and a baseline.

The report is another process's work, of low priority: the script goes on meanwhile, and
no analysis is imported into it.
"""

import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

from madmax_lib.runs.record import Recorder, run_script, say

_PACKAGE = Path(__file__).resolve().parents[2]
_PATIENCE_S = 600.0  # of the end of a script with a report that is still made
_LOWEST_PRIORITY = 19


def record(options: Namespace) -> int:
    """Run a script and record some of its steps; its own exit status."""
    if options.ranks and "RANK" not in os.environ:
        from madmax_lib.runs.testbed import command

        # each rank comes here again, with RANK set
        torchrun = command(options.ranks, "madmax_lib", *sys.argv[1:])
        os.execv(torchrun[0], torchrun)
    if not options.module and not Path(options.script).is_file():
        raise FileNotFoundError(f"{options.script}: no such script")
    reports = []

    def ready(folder, ranks):
        reports.append(_start_report(folder, ranks, options.json))

    recorder = Recorder(
        options.output.absolute(),
        ready,
        options.warmup,
        options.steps,
        options.every,
    )
    recorder.watch()
    try:
        run_script(options.script, options.args, is_module=options.module)
    except (Exception, KeyboardInterrupt) as error:
        # as python shows it, without the two frames that are ours
        error = error.with_traceback(error.__traceback__.tb_next.tb_next)
        sys.excepthook(type(error), error, error.__traceback__)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    finally:
        recorder.end()
        for report in reports:
            try:
                report.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                say(f"process {report.pid} is still making a report")
    return 0


def _start_report(folder, ranks, is_json):
    """Process that prints the breakdown of the traces, and writes page and baseline."""
    page = ["-o", folder / "report.html", "--baseline", folder / "baseline.parquet"]
    command = [sys.executable, "-m", "madmax_lib", "report", folder, *page]
    command += ["--ranks", str(ranks), *(["--json"] if is_json else [])]
    # this package wherever it was found, and nothing of the script's folder
    paths = [str(_PACKAGE), os.environ.get("PYTHONPATH")]
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment["PYTHONSAFEPATH"] = "1"
    process = subprocess.Popen(command, env=os.environ | environment)
    os.setpriority(os.PRIO_PROCESS, process.pid, _LOWEST_PRIORITY)
    return process
