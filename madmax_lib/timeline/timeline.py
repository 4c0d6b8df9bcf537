"""What happened when, on which rank and stream? The one type that measured and
simulated steps share.

`Timeline.spans` has one row per span of time. Everything that analyses, plots, compares
or exports starts from it.
"""

from __future__ import annotations

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
from madmax_lib.timeline.side_tables import SIDE_TABLES, SideTables, joined

__all__ = [
    "BUSY_KINDS",
    "KINDS",
    "SPANS",
    "Meta",
    "Timeline",
    "cached_per_timeline",
    "concat",
    "with_origin",
]

_Tables = TypeVar("_Tables", pd.DataFrame, tuple)

KINDS = ("compute", "comm", "memcpy", "other", "memory", "idle", "cpu", "annotation")
BUSY_KINDS = (
    "compute",
    "comm",
    "memcpy",
    "other",
)  # a device (or, on CPU-only traces, a worker thread) is at work

SPANS = {
    "rank": "int32",  # global rank
    # device stream >= 0; host threads are -1, -2, ... (meta.provenance["threads"] names
    # them)
    "stream": "int32",
    # one of KINDS; memory: allocator event, idle: a stream that waits for an event
    "kind": "category",
    "name": "category",
    "start_ns": "int64",
    "dur_ns": "int64",
    "step": "int32",  # training step, -1 outside of any
    "correlation": "int64",  # joins a launch with its kernel, -1 without
    # operator id (External id in Kineto, index in a simulation), -1 without
    "op": "int64",
    "group": "category",  # process group of a collective, missing otherwise
    "size_bytes": "float64",  # bytes moved, NaN where unknown
}
_ENCODING = {  # times and ids that grow row by row are small and fast as differences
    "use_dictionary": [
        column for column, dtype in SPANS.items() if dtype == "category"
    ],
    "column_encoding": {
        column: "DELTA_BINARY_PACKED"
        for column, dtype in SPANS.items()
        if dtype.startswith("int")
    },
}
_EDGES = {
    "source": "int64",
    "target": "int64",
    "why": "category",
}  # row numbers of spans: target waits for source


@dataclass(frozen=True)
class Meta:
    """Where a timeline comes from."""

    source: str = "measured"  # or "simulated"
    world_size: int = 1  # ranks of the whole job, also those not in the timeline
    # rank in spans: the ranks it stands for, one entry for every rank, also for one
    # without spans; empty: only itself
    represents: dict[int, list[int]] = field(default_factory=dict)
    device: str = ""  # name as the trace or the catalog writes it; empty: unknown
    clock: str = "relative"  # or "unix" (ns since 1970)
    provenance: dict = field(
        default_factory=dict
    )  # files with sha256, reader rules, warnings; free-form but JSON

    def __post_init__(self):
        for name, known in (
            ("source", ("measured", "simulated")),
            ("clock", ("unix", "relative")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is neither {' nor '.join(known)}"
                )


@dataclass(frozen=True, eq=False, repr=False)
class Timeline:
    """Spans, dependencies between them and their origin; checked when it is made.

    spans: one row per span, with the columns of SPANS.
    meta: where it comes from. Default: measured, nothing else known.
    edges: one row per dependency between spans: source, target (rows; the target waits
        for the source), why. Default None, unknown: an empty table.
    side_tables: tables for some analyses (operator shapes, allocator events, ...), see
        `side_tables.SIDE_TABLES`. Default: all empty.
    Raises ValueError naming the column and the rule when the spans do not fit the
    schema. See also: mm.read_trace, mm.simulate, mm.breakdown.
    """

    spans: pd.DataFrame
    meta: Meta = field(default_factory=Meta)
    edges: pd.DataFrame | None = None
    side_tables: SideTables = field(default_factory=SideTables)

    def __post_init__(self):
        object.__setattr__(self, "spans", _conform(self.spans, SPANS, "spans"))
        edges = (
            self.edges
            if self.edges is not None
            else pd.DataFrame({c: [] for c in _EDGES})
        )
        object.__setattr__(self, "edges", _conform(edges, _EDGES, "edges"))
        if not self.meta.represents:
            ranks = {r: [r] for r in sorted(self.spans["rank"].unique().tolist())}
            object.__setattr__(self, "meta", replace(self.meta, represents=ranks))
        _check(self)

    def __len__(self) -> int:
        return len(self.spans)

    def __repr__(self) -> str:
        shape = f"{len(self.ranks)} ranks, {len(self.steps)} steps, {len(self):,} spans"
        return (
            f"Timeline({self.meta.source}, {shape}, "
            f"{self.meta.device or 'no device named'})"
        )

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
    ) -> Timeline:
        """The part of a timeline on some ranks and in some steps; edges that leave the
        part are dropped.
        """
        keep = np.ones(len(self.spans), dtype=bool)
        represents = self.meta.represents
        if ranks is not None:
            if unknown := set(ranks) - set(self.ranks):
                raise ValueError(
                    f"rank {min(unknown)} is not in the timeline; it has {self.ranks}"
                )
            keep &= self.spans["rank"].isin(ranks).to_numpy()
            represents = {r: v for r, v in represents.items() if r in set(ranks)}
        if steps is not None:
            keep &= self.spans["step"].isin(steps).to_numpy()
        return self._part(keep, replace(self.meta, represents=represents))

    def one_step(self, step: int | None = None) -> list[int]:
        """The step, or if none is given the first with device work, as `select` takes
        it; empty where there is none.

        Raises ValueError for a step that the timeline does not have.
        """
        if step is not None and step not in self.steps:
            raise ValueError(
                f"step {step} is not in the timeline; it has {self.steps or 'no steps'}"
            )
        busy = self.spans.loc[self.spans["kind"].isin(BUSY_KINDS), "step"]
        return [step] if step is not None else sorted(set(busy) - {-1})[:1]

    def where(self, keep: np.ndarray) -> Timeline:
        """The spans that a mask (n,) keeps, with all ranks; edges that leave the part
        are dropped.
        """
        return self._part(np.asarray(keep), self.meta)

    def _part(self, keep: np.ndarray, meta: Meta) -> Timeline:
        if keep.all() and meta.represents == self.meta.represents:
            return self
        new_row = np.where(keep, np.cumsum(keep) - 1, -1)
        edges = self.edges.assign(
            source=new_row[self.edges["source"]], target=new_row[self.edges["target"]]
        )
        edges = edges[(edges["source"] >= 0) & (edges["target"] >= 0)].reset_index(
            drop=True
        )
        spans = self.spans[keep].reset_index(drop=True)
        return Timeline(
            spans,
            meta,
            edges,
            self.side_tables.select(new_row, self._windows_ns(keep, meta)),
        )

    def _windows_ns(
        self, keep: np.ndarray, meta: Meta
    ) -> dict[int, tuple[float, float]]:
        """Time of the kept spans of each rank, all time where every span of the rank is
        kept.
        """
        rank = self.spans["rank"].to_numpy()
        windows = dict.fromkeys(meta.represents, (-np.inf, np.inf))
        for cut in np.unique(rank[~keep]).tolist():
            part = self.spans[keep & (rank == cut)]
            if cut in windows:
                windows[cut] = (
                    part["start_ns"].min(),
                    (part["start_ns"] + part["dur_ns"]).max(),
                )
        return windows

    def save(self, path: str | Path) -> Path:
        """Write to one Parquet file (zstd); the file appears whole or not at all."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = Path(path)
        table = pa.Table.from_pandas(self.spans, preserve_index=False)
        tables = {"edges": self.edges} | {
            name: t for name, t in self.side_tables.present().items() if len(t)
        }
        extra = {
            f"madmax.{name}".encode(): _pack(frame) for name, frame in tables.items()
        }
        extra[b"madmax.meta"] = json.dumps(asdict(self.meta)).encode()
        table = table.replace_schema_metadata(
            {**(table.schema.metadata or {}), **extra}
        )
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
    def load(cls, path: str | Path) -> Timeline:
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
        meta["represents"] = {
            int(rank): ranks for rank, ranks in meta["represents"].items()
        }
        return cls(
            table.to_pandas(split_blocks=True),
            Meta(**meta),
            edges,
            SideTables(partial(dict, tables)),
        )


def _pack(frame: pd.DataFrame) -> bytes:
    """A table as text that fits into the metadata of a Parquet file."""
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    table = pa.Table.from_pandas(frame, preserve_index=False)
    with pa.ipc.new_stream(
        sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")
    ) as writer:
        writer.write_table(table)
    return base64.b64encode(sink.getvalue())


def _unpack(text: bytes) -> pd.DataFrame:
    import pyarrow as pa

    return pa.ipc.open_stream(base64.b64decode(text)).read_pandas()


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
        table.attrs.update(
            provenance=_Provenance(origin.meta.provenance), source=origin.meta.source
        )
    else:
        table.attrs.update(
            origin.attrs if isinstance(origin, pd.DataFrame) else {"provenance": origin}
        )
    table.attrs.update(more)
    return table


class _Provenance(dict):
    """Never copied: pandas copies `.attrs` in every operation, and this one has an
    entry per file.
    """

    def __deepcopy__(self, _memo):
        return self


def cached_per_timeline(
    analysis: Callable[[Timeline], _Tables],
) -> Callable[[Timeline], _Tables]:
    """An analysis that others build on: its tables are kept as long as its timeline
    lives, and copies are given out.
    """
    tables: WeakKeyDictionary = WeakKeyDictionary()

    @wraps(analysis)
    def remembered(timeline: Timeline) -> _Tables:
        if require_type("timeline", timeline, Timeline) not in tables:
            tables[timeline] = analysis(timeline)
        result = tables[timeline]
        return (
            tuple(table.copy() for table in result)
            if isinstance(result, tuple)
            else result.copy()
        )

    return remembered


def concat(timelines: Sequence[Timeline]) -> Timeline:
    """One timeline of several with different ranks, in order of rank.

    Raises ValueError for an empty list, for a rank that occurs twice, and for measured
    beside simulated.
    """
    if not timelines:
        raise ValueError("concat needs at least one timeline")
    seen: set[int] = set()
    for timeline in timelines:
        if twice := seen & set(timeline.ranks):
            raise ValueError(f"rank {min(twice)} is in more than one timeline")
        seen |= set(timeline.ranks)
    if len({t.meta.source for t in timelines}) > 1:
        raise ValueError("cannot concatenate measured and simulated timelines")
    timelines = sorted(timelines, key=lambda t: t.ranks)
    if len(timelines) == 1:
        return timelines[0]
    spans = {c: joined([t.spans[c] for t in timelines]) for c in SPANS}
    offsets = np.cumsum([0] + [len(t) for t in timelines[:-1]])
    parts = [
        (t, int(before)) for t, before in zip(timelines, offsets, strict=True)
    ]  # with the number of spans before
    edges = [
        t.edges.assign(source=t.edges["source"] + o, target=t.edges["target"] + o)
        for t, o in parts
    ]
    return Timeline(
        pd.DataFrame(spans),
        _joined_meta([t.meta for t in timelines]),
        pd.DataFrame({c: joined([e[c] for e in edges]) for c in _EDGES}),
        SideTables.join([(t.side_tables, before) for t, before in parts]),
    )


def _joined_meta(metas: list[Meta]) -> Meta:
    represents = {
        rank: ranks for meta in metas for rank, ranks in meta.represents.items()
    }
    provenance: dict = {}
    for meta in metas:
        for key, value in meta.provenance.items():
            if isinstance(value, dict):
                provenance[key] = {**provenance.get(key, {}), **value}
            elif isinstance(value, list):
                provenance[key] = provenance.get(key, []) + value
            else:
                provenance.setdefault(key, value)
    clock = "unix" if all(meta.clock == "unix" for meta in metas) else "relative"
    world_size = max(len(represents), *(meta.world_size for meta in metas))
    return replace(
        metas[0],
        world_size=world_size,
        represents=represents,
        clock=clock,
        provenance=provenance,
    )


def _conform(frame: pd.DataFrame, schema: dict[str, str], what: str) -> pd.DataFrame:
    if missing := [c for c in schema if c not in frame.columns]:
        raise ValueError(f"{what} lack the column(s) {', '.join(missing)}")
    wrong = {c: d for c, d in schema.items() if str(frame[c].dtype) != d}
    given = frame
    try:
        frame = frame if list(frame.columns) == list(schema) else frame[list(schema)]
        frame = frame.astype(wrong) if wrong else frame
    except (ValueError, TypeError) as error:
        raise ValueError(f"{what} do not fit the schema: {error}") from None
    for column in [c for c, d in wrong.items() if d.startswith("int")]:
        if (changed := frame[column] != given[column]).any():
            raise ValueError(
                f"{what}: {column}={given[column][changed].iloc[0]} does not fit "
                f"{schema[column]}"
            )
    for column in [
        c
        for c, d in schema.items()
        if d == "category" and frame[c].cat.categories.dtype != object
    ]:
        text = pd.Index(list(map(str, frame[column].cat.categories)), dtype=object)
        frame = frame.assign(**{column: frame[column].cat.rename_categories(text)})
    return frame


def _check(timeline: Timeline) -> None:
    spans = timeline.spans
    edges = timeline.edges
    if unknown := set(spans["kind"].cat.categories) - set(KINDS):
        raise ValueError(
            f"kind {sorted(unknown)[0]!r} is not one of {', '.join(KINDS)}"
        )
    if spans["kind"].isna().any() or spans["name"].isna().any():
        raise ValueError("every span needs a kind and a name")
    by_hta = (
        timeline.meta.provenance.get("rules") == "hta"
    )  # whose rounding turns short spans around
    if len(spans) and spans["dur_ns"].min() < 0 and not by_hta:
        row = int(spans["dur_ns"].argmin())
        raise ValueError(
            f"dur_ns={spans['dur_ns'].iloc[row]} of span {row} "
            f"({spans['name'].iloc[row]}) is negative"
        )
    if lost := set(spans["rank"].unique().tolist()) - set(timeline.meta.represents):
        raise ValueError(f"rank {min(lost)} has spans but is not in meta.represents")
    ends = edges.loc[:, ["source", "target"]].to_numpy()
    if ends.size and not (ends.min() >= 0 and ends.max() < len(spans)):
        raise ValueError(f"an edge points outside of the {len(spans)} spans")
