"""Results of Holistic Trace Analysis on the same traces. The only module that imports
`hta`.

Each function gives one of HTA's results as a tidy table in seconds and ratios. Where
HTA 0.5.0 itself fails (traces without a GPU, queues without launches) the table is
empty and a `TraceWarning` says so. HTA reads the files anew.
"""

import contextlib
import logging
import warnings
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from madmax_lib.base.extras import with_extra
from madmax_lib.timeline import breakdown
from madmax_lib.traces.read.files import find_traces
from madmax_lib.traces.read.kineto import TraceWarning, read_trace

if TYPE_CHECKING:
    from hta.trace_analysis import TraceAnalysis


def analysis(source: str | Path | Sequence[str | Path]) -> "TraceAnalysis":
    """HTA's TraceAnalysis of a file, list or directory; ranks as `read_trace` finds
    them, also without distributedInfo.

    Raises what `read_trace` raises, and ImportError when HTA is not installed.
    """
    # HTA asks for the rank of each file; it reads a file anew and by its absolute path.
    files = {
        read_trace(path).ranks[0]: str(path.resolve()) for path in find_traces(source)
    }
    with _quiet():
        try:
            from hta.trace_analysis import TraceAnalysis
        except ModuleNotFoundError as error:
            raise with_extra(error) from None

        return TraceAnalysis(trace_files=files, trace_dir="/")


def beside_hta(source: str | Path | Sequence[str | Path]) -> pd.DataFrame:
    """Our breakdown beside HTA's: rank, quantity, exact, compatible, hta, error
    (compatible - hta).

    exact is our default, compatible our reading with `hta_compatible=True`. Times in
    seconds, overlap in 0..1.
    """
    hta = analysis(source)
    # Ranks without a GPU have an overlap but no times.
    theirs = temporal(hta).merge(overlap(hta), on="rank", how="right")
    exact, compatible = (
        breakdown(read_trace(source, hta_compatible=flag)) for flag in (False, True)
    )
    tables = {"exact": exact, "compatible": compatible, "hta": theirs}
    long = [
        table[list(theirs)].melt("rank", var_name="quantity", value_name=name)
        for name, table in tables.items()
    ]
    # One row per rank and quantity, a column per reading.
    table = reduce(pd.merge, long)
    return table.assign(error=table["compatible"] - table["hta"])


def temporal(hta: "TraceAnalysis") -> pd.DataFrame:
    """rank, total_s, compute_s, non_compute_s, idle_s (HTA get_temporal_breakdown)."""
    names = {"kernel_time(us)": "total_s", "compute_time(us)": "compute_s"}
    # HTA counts in microseconds.
    names |= {"non_compute_time(us)": "non_compute_s", "idle_time(us)": "idle_s"}
    if not (ranks := _gpu_ranks(hta, "temporal breakdown")):
        return pd.DataFrame(columns=["rank", *names.values()])
    with _quiet(), _only(hta, ranks):
        table = hta.get_temporal_breakdown(visualize=False)
    return _seconds(table.rename(columns=names)[["rank", *names.values()]])


def overlap(hta: "TraceAnalysis") -> pd.DataFrame:
    """rank, overlap in 0..1, rounded by HTA to 0.01 percentage points (HTA
    get_comm_comp_overlap).
    """
    with _quiet():
        table = hta.get_comm_comp_overlap(visualize=False)
    return pd.DataFrame(
        # Percentage points, as HTA rounds them.
        {"rank": table["rank"], "overlap": table["comp_comm_overlap_pctg"] / 100}
    )


def idle(hta: "TraceAnalysis") -> pd.DataFrame:
    """rank, stream, cause, idle_s, share of the stream's idle time in 0..1 (HTA
    get_idle_time_breakdown).
    """
    columns = ["rank", "stream", "cause", "idle_s", "share"]
    if not (ranks := _gpu_ranks(hta, "idle time breakdown")):
        return pd.DataFrame(columns=columns)
    with _quiet():
        table, _ = hta.get_idle_time_breakdown(ranks=ranks, visualize=False)
    names = {
        "idle_category": "cause",
        "idle_time": "idle_s",
        "idle_time_ratio": "share",
    }
    return _seconds(table.rename(columns=names)[columns])


def _seconds(table):
    times = [column for column in table.columns if column.endswith("_s")]
    return table.assign(
        **{column: table[column].astype(float) * 1e-6 for column in times}
    ).reset_index(drop=True)


def _gpu_ranks(hta, what):
    """Ranks with GPU rows; HTA raises on the others, and has nothing to say about them."""
    ranks = sorted(
        rank for rank, table in hta.t.traces.items() if (table["stream"] >= 0).any()
    )
    if without := sorted(set(hta.t.traces) - set(ranks)):
        text = (
            f"HTA has no {what} for traces without GPU rows (rank "
            f"{', '.join(map(str, without))})"
        )
        warnings.warn(text, TraceWarning, stacklevel=3)
    return ranks


@contextlib.contextmanager
def _only(hta, ranks):
    """HTA with the traces of some ranks, where its call takes no list of ranks."""
    traces = hta.t.traces
    hta.t.traces = {rank: traces[rank] for rank in ranks}
    try:
        yield
    finally:
        hta.t.traces = traces


@contextlib.contextmanager
def _quiet():
    """HTA logs every step as a warning and trips over pandas' deprecations; neither
    helps its reader.
    """
    logger = logging.getLogger("hta")
    level = logger.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Back to what it was at the end: the level is global.
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)
