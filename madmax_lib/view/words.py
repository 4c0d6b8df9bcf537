"""Colours and words that pictures and pages share: values without matplotlib, so that
a page is made without it.
"""

import numpy as np
import pandas as pd

from madmax_lib.simulator.events.engine import Stream
from madmax_lib.timeline import Meta

COLORS = {  # also told apart by lightness alone, in print without colour
    "compute": "#3b75af",
    "comm": "#e1812c",
    "hidden": "#f4c79a",
    "memcpy": "#8cc269",
    "other": "#56378c",
    "memory": "#a63d7f",
    "idle": "#d9d9d9",
}
LABELS = {
    "compute": "compute",
    "comm": "communication",
    "memcpy": "copies",
    "other": "other",
    "idle": "idle",
}


def plural(count: int, noun: str) -> str:
    """A count with its noun.

    >>> plural(1, "rank"), plural(1200, "call")
    ('1 rank', '1,200 calls')
    """
    return f"{count:,.0f} {noun}{'' if count == 1 else 's'}"


def percent(share: float) -> str:
    """A share as text, with more digits where it is small.

    >>> percent(0.46), percent(0.027), percent(0.00031)
    ('46%', '2.7%', '0.031%')
    """
    return f"{share:.0%}" if share >= 0.1 else f"{share * 100:.2g}%"


def shorten(text: object, most: int = 38, *, keep_end: bool = False) -> str:
    """A text that fits beside a bar: what is too long loses its end, or with `keep_end`
    its beginning.

    >>> shorten("reduce_scatter", 10), shorten("reduce_scatter", 10, keep_end=True)
    ('reduce_sc…', '…e_scatter')
    """
    text = str(text)
    if len(text) <= most:
        return text
    return f"…{text[1 - most :]}" if keep_end else f"{text[: most - 1]}…"


def lanes(spans: pd.DataFrame, meta: Meta | None = None) -> pd.DataFrame:
    """Rank, stream, place and label of each row to draw; with the meta of a step
    simulated here, streams have names.

    By rank, device before host, then number.
    """
    # only the simulator's own steps have its streams; an imported one may be anybody's
    simulated = meta is not None and meta.source == "simulated"
    named = simulated and "plan" in meta.provenance
    rows = spans[["rank", "stream"]].drop_duplicates()
    # threads of the host have negative numbers; lexsort takes the last key first
    stream = rows["stream"]
    order = np.lexsort((stream.abs(), stream < 0, rows["rank"]))
    rows = rows.iloc[order].reset_index(drop=True)
    return rows.assign(
        place=rows.index,
        label=[row_label(*row, named=named) for row in rows.itertuples(index=False)],
    )


def row_label(rank: int, stream: int, *, named: bool = False) -> str:
    """Text for a row of a timeline; named: of the simulator's streams, by what they do.

    >>> row_label(8, 1), row_label(8, 1, named=True)
    ('rank 8 · stream 1', 'rank 8 · tensor parallel')
    """
    if named and stream in set(Stream):
        return f"rank {rank} · {Stream(stream).label}"
    lane = f"stream {stream}" if stream >= 0 else f"thread {-stream}"
    return f"rank {rank} · {lane}"
