"""How do typed events become arrays? One array per column, exact nanoseconds, names and threads as codes."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from decimal import ROUND_HALF_EVEN, Decimal, InvalidOperation
from pathlib import Path

import numpy as np

from madmax_lib.traces.chrome import decode_pieces
from madmax_lib.traces.events import Args, Event, RawTrace

__all__ = ["Codes", "Columns", "NeedsDecimal", "complete", "dtype_bytes", "integers", "nanoseconds", "read_columns"]

_FLOAT_IS_EXACT_US = 2.0**43  # below, the spacing of float64 is under 1 ns, so three decimals can be recovered
_DTYPE_BYTES = {"float": 4, "int": 4, "double": 8, "long": 8, "half": 2, "bfloat16": 2, "short": 2, "byte": 1,
                "char": 1, "bool": 1, "complexfloat": 8, "complexdouble": 16}  # fmt: skip
_NO_ARGS = Args()


class NeedsDecimal(Exception):
    """Times too large for exact nanoseconds in float64."""


class Codes(dict):
    """Numbers values in order of appearance."""

    def __missing__(self, key):
        code = self[key] = len(self)
        return code

    def of(self, values: list) -> np.ndarray:
        try:
            return np.fromiter(map(self.__getitem__, values), dtype=np.int32, count=len(values))
        except TypeError:  # a name or thread that is a list
            return self.of([tuple(map(str, value)) if isinstance(value, tuple) else str(value) for value in values])


@dataclass
class Columns:
    """Duration events of one file as arrays of one length (n,), in file order.

    ts_us and dur_us are float64 as HTA sees them; start_ns and dur_ns are exact and relative to the file's own zero.
    stream is -1 where the event names none. thread, name and category are codes into the lists of the same name.
    """

    start_ns: np.ndarray
    dur_ns: np.ndarray
    ts_us: np.ndarray
    dur_us: np.ndarray
    stream: np.ndarray
    correlation: np.ndarray
    op: np.ndarray
    size_bytes: np.ndarray
    name: np.ndarray
    category: np.ndarray
    thread: np.ndarray
    group: np.ndarray
    names: list[str] = field(default_factory=list)
    categories: list[str] = field(default_factory=list)
    threads: list[tuple] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)
    float_ts: bool = False  # some event has a time with a decimal point
    group_rank: int | None = None  # global rank found in the metadata of a collective

    def __len__(self) -> int:
        return len(self.start_ns)


def read_columns(path: str | Path) -> tuple[Columns, RawTrace]:
    """Read one trace file; see `chrome.decode_pieces` for the errors."""
    for exact in (False, True):
        trace = RawTrace(Path(path))
        try:
            columns = _gather(trace, exact)
        except NeedsDecimal:
            continue
        trace.warn()
        return columns, trace
    raise AssertionError("decimal times are always exact")


def _gather(trace: RawTrace, exact: bool) -> Columns:
    codes = {key: Codes() for key in ("name", "category", "thread", "group")}
    parts, float_ts, group_rank = [], False, None
    for events in decode_pieces(trace, exact=exact):
        float_ts = float_ts or any(type(event.ts) is not int for event in events)
        rows = complete(events)
        if group_rank is None and not _tells_rank(trace.envelope.get("distributedInfo")):
            group_rank = next((r for e in rows if (r := _global_rank(e.args)) is not None), None)
        parts.append(_piece(rows, codes, exact))
        lost = len(rows) - len(parts[-1]["start_ns"])
        trace.events, trace.skipped = trace.events - lost, trace.skipped + lost
    arrays = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    return Columns(
        **arrays,
        names=_distinct(codes["name"], arrays["name"]),
        categories=[str(category).strip().lower() for category in codes["category"]],
        threads=list(codes["thread"]),
        groups=list(codes["group"]),
        float_ts=float_ts,
        group_rank=group_rank,
    )


def complete(events: list[Event]) -> list[Event]:
    """The events that last some time; one span each, if their times are numbers."""
    return [e for e in events if e.dur is not None and e.cat is not None and e.ph in ("X", None) and e.cat != "Trace"]


def _piece(rows: list[Event], codes: dict[str, Codes], exact: bool) -> dict[str, np.ndarray]:
    start_ns, sound = nanoseconds([e.ts for e in rows], exact)
    dur_ns, sound_dur = nanoseconds([e.dur for e in rows], exact)
    if not (sound & sound_dur).all():  # a time that is no number: the event cannot be placed
        rows = [e for e, good in zip(rows, sound & sound_dur, strict=True) if good]
        return _piece(rows, codes, exact)
    args = [e.args or _NO_ARGS for e in rows]
    return {
        "start_ns": start_ns,
        "dur_ns": dur_ns,
        "ts_us": np.array([e.ts for e in rows], dtype=np.float64),
        "dur_us": np.array([e.dur for e in rows], dtype=np.float64),
        "stream": integers([a.stream for a in args]),
        "correlation": integers([a.correlation for a in args]),
        "op": integers([_external_id(a) for a in args]),
        "size_bytes": _sizes(args),
        "name": codes["name"].of([e.name for e in rows]),
        "category": codes["category"].of([e.cat for e in rows]),
        "thread": codes["thread"].of([(e.pid, e.tid) for e in rows]),
        "group": codes["group"].of([_group(a) if a.group is not None else "" for a in args]),
    }


def nanoseconds(us: list, exact: bool) -> tuple[np.ndarray, np.ndarray]:
    """Whole nanoseconds (n,) of decimal microseconds, and where they are numbers at all.

    Splitting off the whole microseconds first keeps the product below 2**53, so rounding gives back the decimals.
    """
    try:
        values = np.array(us)
    except ValueError:
        values = np.array([None] * len(us))
    flat = values.ndim == 1
    if values.dtype.kind == "i" and flat and -(2**52) < values.min(initial=0) <= values.max(initial=0) < 2**52:
        return values.astype(np.int64) * 1000, np.ones(len(us), bool)
    if values.dtype.kind == "f" and flat and not exact:
        sound = np.isfinite(values)
        values = np.where(sound, values, 0.0)
        if len(values) and np.abs(values).max() >= _FLOAT_IS_EXACT_US:
            raise NeedsDecimal
        whole = np.floor(values)
        return whole.astype(np.int64) * 1000 + np.rint((values - whole) * 1000).astype(np.int64), sound
    if not exact and any(isinstance(value, float) and abs(value) >= _FLOAT_IS_EXACT_US for value in us):
        raise NeedsDecimal
    converted = [_decimal_ns(value) for value in us]
    sound = np.array([ns is not None for ns in converted], dtype=bool)
    return np.array([ns or 0 for ns in converted], dtype=np.int64), sound


def _decimal_ns(us) -> int | None:
    if isinstance(us, bool):
        return None
    try:
        ns = int((Decimal(us) * 1000).to_integral_value(ROUND_HALF_EVEN))
    except (InvalidOperation, TypeError, ValueError, OverflowError):
        return None
    return ns if abs(ns) < 2**62 else None


def integers(values: list, missing: int = -1) -> np.ndarray:
    """(n,) int64, `missing` where there is none or no integer."""
    try:
        numbers = np.array([missing if v is None else v for v in values], dtype=np.int64)
    except (ValueError, TypeError, OverflowError):
        numbers = np.empty(0)
    return numbers if numbers.shape == (len(values),) else np.array([_integer(v, missing) for v in values], np.int64)


def _integer(value, missing: int = -1) -> int:
    try:
        number = int(value)
    except (ValueError, TypeError, OverflowError):
        return missing
    return number if abs(number) < 2**63 else missing


def _external_id(args: Args):
    for value in (args.external_id, args.external_id_new, args.external_id_old):
        if value is not None:
            return value
    return None


def _sizes(args: list[Args]) -> np.ndarray:
    sizes = np.full(len(args), np.nan)
    for row, arg in enumerate(args):
        if arg.size_bytes is not None or arg.collective is not None:
            sizes[row] = _size_bytes(arg)
    return sizes


def _distinct(codes: dict, rows: np.ndarray) -> list[str]:
    """Names as text; two values that print alike (1 and "1") become one."""
    texts = [name if isinstance(name, str) else str(name) for name in codes]
    if len(set(texts)) < len(texts):
        merged = Codes()
        rows[:] = merged.of(texts)[rows]
        return list(merged)
    return texts


def _size_bytes(args: Args) -> float:
    """Bytes of a copy, or of a collective's larger side; NaN where the event does not say."""
    try:
        if args.size_bytes is not None:
            return float(args.size_bytes)
        if args.collective is not None:
            return max(int(args.in_elements or 0), int(args.out_elements or 0)) * dtype_bytes(str(args.dtype))
    except (TypeError, ValueError):
        pass
    return float("nan")


def _group(args: Args) -> str:
    """Name of a process group with its ranks, as far as the event lists them: groups of one name may differ."""
    return f"{args.group} {args.group_ranks}" if args.group_ranks else str(args.group)


def dtype_bytes(dtype: str) -> float:
    dtype = dtype.lower()
    return 1 if dtype.startswith("float8") else _DTYPE_BYTES.get(dtype, float("nan"))


def _tells_rank(info) -> bool:
    return isinstance(info, dict) and "rank" in info


def _global_rank(args: Args | None) -> int | None:
    """Rank from a collective's metadata: Rank counts inside the group, whose members the event may list."""
    if args is None or (position := _integer(args.group_rank)) < 0:
        return None
    ranks = re.findall(r"\d+", str(args.group_ranks or "").split("...")[0])
    return int(ranks[position]) if position < len(ranks) else position
