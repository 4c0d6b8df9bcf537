"""`Timeline`: what happened when, on which rank and stream. The one type that measured
and simulated steps share.

`Timeline.spans` has one row per span of time. Everything that analyses, plots, compares
or exports starts from it.
"""

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial, wraps
from pathlib import Path
from typing import TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import pandas as pd

from madmax_lib.base.atomic import replacing
from madmax_lib.base.fields import require_type
from madmax_lib.timeline.side_tables import SIDE_TABLES, SPANS, SideTables, joined

_Tables = TypeVar("_Tables", pd.DataFrame, tuple)

KINDS = ("compute", "comm", "memcpy", "other", "memory", "idle", "cpu", "annotation")
# a device (or, on CPU-only traces, a worker thread) is at work
BUSY_KINDS = ("compute", "comm", "memcpy", "other")

# row numbers of spans: target waits for source
_EDGES = {"source": "int64", "target": "int64", "why": "category"}
_INTEGERS = [column for column, dtype in SPANS.items() if dtype.startswith("int")]
# Parquet: times and ids that grow row by row are small and fast as differences
_ENCODING = {
    "use_dictionary": [c for c, dtype in SPANS.items() if dtype == "category"],
    "column_encoding": dict.fromkeys(_INTEGERS, "DELTA_BINARY_PACKED"),
}


@dataclass(frozen=True)
class Meta:
    """Origin of a timeline.

    >>> Meta(source="simulated", world_size=8).clock
    'relative'
    """

    source: str = "measured"  # or "simulated"
    world_size: int = 1  # ranks of the whole job, also those not in the timeline
    # rank in spans: the ranks it stands for, one entry for every rank, also for one
    # without spans; empty: only itself
    represents: dict[int, list[int]] = field(default_factory=dict)
    device: str = ""  # name as the trace or the catalog writes it; empty: unknown
    clock: str = "relative"  # or "unix" (ns since 1970)
    # files with sha256, reader rules, warnings: JSON; `traces.read.readers` lists
    # the keys that readers set
    provenance: dict = field(default_factory=dict)

    def __post_init__(self):
        words = {"source": ("measured", "simulated"), "clock": ("unix", "relative")}
        for name, allowed in words.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name}={value!r} is neither {' nor '.join(allowed)}")


@dataclass(frozen=True, eq=False, repr=False)
class Timeline:
    """Spans, dependencies between them and their origin; checked when it is made.

        timeline = mm.read_trace("rank0.json.gz")
        timeline.select(steps=[3]).spans[["name", "start_ns", "dur_ns"]]

    spans: one row per span, with the columns of SPANS.
    meta: where it comes from. Default: measured, nothing else known.
    edges: one row per dependency between spans: source, target (rows; the target waits
        for the source), why. Default None, unknown: an empty table.
    side_tables: tables for some analyses (operator shapes, allocator events, ...), see
        `side_tables.SIDE_TABLES`. Default: all empty.
    Raises ValueError naming the column and the rule when the spans do not fit the
    schema. A timeline equals itself alone, so that it can be a key; whether another has
    the same spans says `a.spans.equals(b.spans)`.
    See also: mm.read_trace, mm.simulate, mm.breakdown.
    """

    spans: pd.DataFrame
    meta: Meta = field(default_factory=Meta)
    edges: pd.DataFrame | None = None
    side_tables: SideTables = field(default_factory=SideTables)

    def __post_init__(self):
        object.__setattr__(self, "spans", _conform(self.spans, SPANS, "spans"))
        edges = self.edges
        if edges is None:
            edges = pd.DataFrame({column: [] for column in _EDGES})
        object.__setattr__(self, "edges", _conform(edges, _EDGES, "edges"))
        if not self.meta.represents:  # each rank stands for itself
            ranks = {r: [r] for r in sorted(self.spans["rank"].unique().tolist())}
            object.__setattr__(self, "meta", replace(self.meta, represents=ranks))
        _check(self)

    def __len__(self):
        return len(self.spans)

    def __repr__(self):
        shape = f"{len(self.ranks)} ranks, {len(self.steps)} steps, {len(self):,} spans"
        device = self.meta.device or "no device named"
        return f"Timeline({self.meta.source}, {shape}, {device})"

    @property
    def ranks(self) -> list[int]:
        """Ranks in order, also those without spans."""
        return sorted(self.meta.represents)

    @property
    def steps(self) -> list[int]:
        """Steps in order, without -1 (outside of any step)."""
        return sorted(s for s in self.spans["step"].unique().tolist() if s >= 0)

    def select(
        self, *, ranks: Sequence[int] | None = None, steps: Sequence[int] | None = None
    ) -> "Timeline":
        """The part of a timeline on some ranks and in some steps; edges that leave the
        part are dropped.
        """
        keep = np.ones(len(self.spans), dtype=bool)
        meta = self.meta
        if ranks is not None:
            if unknown := set(ranks) - set(self.ranks):
                raise ValueError(
                    f"rank {min(unknown)} is not in the timeline; it has {self.ranks}"
                )
            keep &= self.spans["rank"].isin(ranks).to_numpy()
            represents = {r: v for r, v in meta.represents.items() if r in ranks}
            meta = replace(meta, represents=represents)
        if steps is not None:
            keep &= self.spans["step"].isin(steps).to_numpy()
        return self._part(keep, meta)

    def one_step(self, step: int | None = None) -> list[int]:
        """The step, or if none is given the first with device work, as `select` takes
        it; empty where there is none.

        Raises ValueError for a step that the timeline does not have.
        """
        if step is not None and step not in self.steps:
            raise ValueError(
                f"step {step} is not in the timeline; it has {self.steps or 'no steps'}"
            )
        if step is not None:
            return [step]
        return sorted(set(busy_spans(self.spans)["step"]) - {-1})[:1]

    def where(self, keep: np.ndarray) -> "Timeline":
        """The spans that a mask (n,) keeps, with all ranks; edges that leave the part
        are dropped.
        """
        return self._part(np.asarray(keep), self.meta)

    def _part(self, keep, meta):
        if keep.all() and meta.represents == self.meta.represents:
            return self
        # (n,) row of each span in the part, -1 where it is left out
        new_row = np.where(keep, np.cumsum(keep) - 1, -1)
        source = new_row[self.edges["source"]]
        target = new_row[self.edges["target"]]
        edges = self.edges.assign(source=source, target=target)
        edges = edges[(source >= 0) & (target >= 0)].reset_index(drop=True)
        spans = self.spans[keep].reset_index(drop=True)
        windows_ns = self._windows_ns(keep, meta)
        return Timeline(
            spans, meta, edges, self.side_tables.select(new_row, windows_ns)
        )

    def _windows_ns(self, keep, meta):
        """Time of the kept spans of each rank, all time where every span of the rank is
        kept.
        """
        rank = self.spans["rank"].to_numpy()
        windows = dict.fromkeys(meta.represents, (-np.inf, np.inf))
        for number in set(rank[~keep].tolist()) & set(windows):
            part = self.spans[keep & (rank == number)]
            end_ns = part["start_ns"] + part["dur_ns"]
            windows[number] = (part["start_ns"].min(), end_ns.max())
        return windows

    def save(self, path: str | Path) -> Path:
        """Write to one Parquet file (zstd); the file appears whole or not at all."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = Path(path)
        table = pa.Table.from_pandas(self.spans, preserve_index=False)
        # spans are the table of the file; all else is text in its metadata
        present = self.side_tables.present()
        tables = {name: frame for name, frame in present.items() if len(frame)}
        tables["edges"] = self.edges
        extra = {f"madmax.{name}": _pack(frame) for name, frame in tables.items()}
        extra["madmax.meta"] = json.dumps(asdict(self.meta))
        metadata = table.schema.metadata or {}
        table = table.replace_schema_metadata(metadata | extra)
        with replacing(path) as temporary:
            pq.write_table(
                table,
                temporary,
                compression="zstd",
                write_page_checksum=True,
                **_ENCODING,
            )
        return path

    @classmethod
    def load(cls, path: str | Path) -> "Timeline":
        """Read what `save` wrote. Raises ValueError when the file is not a saved
        timeline.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            table = pq.read_table(
                path, page_checksum_verification=True, use_threads=False
            )
            extra = table.schema.metadata or {}
            meta = json.loads(extra[b"madmax.meta"])
            edges = _unpack(extra[b"madmax.edges"])
            tables = {
                n: _unpack(extra[key])
                for n in SIDE_TABLES
                if (key := f"madmax.{n}".encode()) in extra
            }
        except (pa.ArrowInvalid, KeyError, ValueError) as error:
            raise ValueError(f"{path}: not a saved timeline ({error})") from None
        # JSON has only text as keys
        represents = meta["represents"].items()
        meta["represents"] = {int(rank): ranks for rank, ranks in represents}
        return cls(
            table.to_pandas(split_blocks=True),
            Meta(**meta),
            edges,
            SideTables(partial(dict, tables)),
        )


def _pack(frame):
    """A table as text that fits into the metadata of a Parquet file."""
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    table = pa.Table.from_pandas(frame, preserve_index=False)
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    return base64.b64encode(sink.getvalue())


def _unpack(text):
    import pyarrow as pa

    return pa.ipc.open_stream(base64.b64decode(text)).read_pandas()


def busy_spans(spans: pd.DataFrame) -> pd.DataFrame:
    """Spans in which a device, or a worker thread on a CPU, is at work."""
    return spans[spans["kind"].isin(BUSY_KINDS)]


def ends_ns(spans: pd.DataFrame) -> pd.Series:
    """End (n,) of each span, of spans or slices of spans."""
    return spans["start_ns"] + spans["dur_ns"]


def with_origin(
    table: pd.DataFrame, origin: Timeline | pd.DataFrame | dict, **more
) -> pd.DataFrame:
    """The table itself, with what it was made from in `.attrs`, which plots and figures
    read.

    origin: the timeline that was analysed; or a table made from it, whose attributes
    are passed on; or a provenance as in `Meta`. Every table that an analysis returns
    goes through here last, because pandas loses `.attrs` in many operations. Keys:
    source (measured or simulated) and provenance, as in `Meta`, and what the analysis
    adds as `more`.
    """
    if isinstance(origin, Timeline):
        provenance = _Uncopied(origin.meta.provenance)
        attributes = {"provenance": provenance, "source": origin.meta.source}
    elif isinstance(origin, pd.DataFrame):
        attributes = origin.attrs
    else:
        attributes = {"provenance": origin}
    table.attrs.update(attributes | more)
    return table


class _Uncopied(dict):
    """A provenance that is never copied: pandas copies `.attrs` in every operation, and
    this one has an entry per file.
    """

    def __deepcopy__(self, _memo):
        return self


def cached_per_timeline(
    analysis: Callable[[Timeline], _Tables],
) -> Callable[[Timeline], _Tables]:
    """Decorate an analysis that others build on: it runs once per timeline, whose tables
    stay as long as the timeline lives; callers get copies, which they may change.
    """
    tables = WeakKeyDictionary()

    @wraps(analysis)
    def remembered(timeline):
        if require_type("timeline", timeline, Timeline) not in tables:
            tables[timeline] = analysis(timeline)
        result = tables[timeline]
        if isinstance(result, tuple):
            return tuple(table.copy() for table in result)
        return result.copy()

    return remembered


def concat(timelines: Sequence[Timeline]) -> Timeline:
    """One timeline of several with different ranks, in order of rank.

    Raises ValueError for an empty list, for a rank that occurs twice, and for measured
    beside simulated.
    """
    if not timelines:
        raise ValueError("concat needs at least one timeline")
    seen = set()
    for timeline in timelines:
        if twice := seen & set(timeline.ranks):
            raise ValueError(f"rank {min(twice)} is in more than one timeline")
        seen |= set(timeline.ranks)
    if len({t.meta.source for t in timelines}) > 1:
        raise ValueError("cannot concatenate measured and simulated timelines")
    timelines = sorted(timelines, key=lambda t: t.ranks)
    if len(timelines) == 1:
        return timelines[0]
    # rows of edges and side tables move by the number of spans of the timelines before
    edges = []
    side_tables = []
    spans_before = 0
    for timeline in timelines:
        rows = timeline.edges[["source", "target"]] + spans_before
        edges.append(rows.assign(why=timeline.edges["why"]))
        side_tables.append((timeline.side_tables, spans_before))
        spans_before += len(timeline)
    return Timeline(
        pd.DataFrame({c: joined([t.spans[c] for t in timelines]) for c in SPANS}),
        _joined_meta([t.meta for t in timelines]),
        pd.DataFrame({c: joined([e[c] for e in edges]) for c in _EDGES}),
        SideTables.join(side_tables),
    )


def _joined_meta(metas):
    """Origin of timelines that are put together; entries by rank are merged."""
    represents = {}
    provenance = {}
    for meta in metas:
        represents |= meta.represents
        for key, value in meta.provenance.items():
            if isinstance(value, dict):
                provenance[key] = provenance.get(key, {}) | value
            elif isinstance(value, list):
                provenance[key] = provenance.get(key, []) + value
            else:
                provenance.setdefault(key, value)
    # times are since 1970 only if those of all are
    clock = min(meta.clock for meta in metas)
    world_size = max(len(represents), *(meta.world_size for meta in metas))
    changes = {"represents": represents, "clock": clock, "provenance": provenance}
    return replace(metas[0], world_size=world_size, **changes)


def _conform(frame, schema, what):
    """The columns of a schema, of its types and in its order; the frame itself where it
    is right, as millions of rows are not copied for nothing.
    """
    if missing := [c for c in schema if c not in frame.columns]:
        raise ValueError(f"{what} lack the column(s) {', '.join(missing)}")
    original = frame
    wrong = {c: dtype for c, dtype in schema.items() if str(frame[c].dtype) != dtype}
    try:
        if list(frame.columns) != list(schema):
            frame = frame[list(schema)]
        frame = frame.astype(wrong) if wrong else frame
    except (ValueError, TypeError) as error:
        raise ValueError(f"{what} do not fit the schema: {error}") from None
    for column, dtype in wrong.items():
        # a cast to fewer bits or from a fraction loses without a word
        values = original[column]
        if dtype.startswith("int") and (lost := frame[column] != values).any():
            raise ValueError(
                f"{what}: {column}={values[lost].iloc[0]} does not fit {dtype}"
            )
    for column, dtype in schema.items():
        # names are text: categories may be numbers, as in a table read from CSV
        if dtype == "category" and frame[column].cat.categories.dtype != object:
            texts = [str(category) for category in frame[column].cat.categories]
            index = pd.Index(texts, dtype=object)
            frame = frame.assign(**{column: frame[column].cat.rename_categories(index)})
    return frame


def _check(timeline):
    spans = timeline.spans
    if unknown := set(spans["kind"].cat.categories) - set(KINDS):
        raise ValueError(
            f"kind {sorted(unknown)[0]!r} is not one of {', '.join(KINDS)}"
        )
    if spans["kind"].isna().any() or spans["name"].isna().any():
        raise ValueError("every span needs a kind and a name")
    # HTA rounds starts up and ends down, which turns the shortest spans around
    by_hta = timeline.meta.provenance.get("rules") == "hta"
    if len(spans) and spans["dur_ns"].min() < 0 and not by_hta:
        row = int(spans["dur_ns"].argmin())
        raise ValueError(
            f"dur_ns={spans['dur_ns'].iloc[row]} of span {row} "
            f"({spans['name'].iloc[row]}) is negative"
        )
    if lost := set(spans["rank"].unique().tolist()) - set(timeline.meta.represents):
        raise ValueError(f"rank {min(lost)} has spans but is not in meta.represents")
    ends = timeline.edges[["source", "target"]].to_numpy()
    if ends.size and not (ends.min() >= 0 and ends.max() < len(spans)):
        raise ValueError(f"an edge points outside of the {len(spans)} spans")
