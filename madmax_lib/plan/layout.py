"""Layouts of a pipeline, which state the layers of every chunk in the pipeline's order
(chunk c of stage s is number c x pp + s).

`3+2x29+1m` is a chunk of 3 layers, 29 of 2, and one of a layer and an MTP layer, which
predicts one token further [arXiv 2412.19437, 2.2] and comes after all other layers.
"""

import re
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from madmax_lib.base import short_repr

_PART = re.compile(r"(\d{1,4})(m{0,99})(?:x([1-9]\d{0,3}))?", re.ASCII)


class Chunk(NamedTuple):
    """Layers of a chunk."""

    layers: int
    predictions: int  # MTP layers behind them


@lru_cache(maxsize=4096)
def layout_chunks(text: str) -> tuple[Chunk, ...]:
    """Chunks of a layout, none of an empty text.

    Raises ValueError for another text, and for layers behind an MTP layer.

    >>> layout_chunks("3+1x2+0m")[1:]
    (Chunk(layers=1, predictions=0), Chunk(layers=1, predictions=0), Chunk(layers=0, predictions=1))
    """
    chunks = []
    for part in text.split("+") if text else ():
        match = _PART.fullmatch(part)
        if not match:
            raise ValueError(
                f"layout={short_repr(text)} is not numbers of layers such as 3+2x29+1m"
            )
        chunk = Chunk(int(match[1]), len(match[2]))
        if chunk.layers and any(before.predictions for before in chunks):
            raise ValueError(f"layout={text} has layers behind an MTP layer")
        chunks += [chunk] * int(match[3] or 1)
    return tuple(chunks)


def layout_text(chunks: tuple[Chunk, ...]) -> str:
    """The shortest text of a layout."""
    parts = []
    for (layers, predictions), equal in groupby(chunks):
        count = len(list(equal))
        parts.append(f"{layers}{'m' * predictions}" + f"x{count}" * (count > 1))
    return "+".join(parts)


def layout_layers(text: str) -> int:
    """Layers of all chunks, MTP layers among them."""
    return sum(map(sum, layout_chunks(text)))


def predictions(text: str) -> int:
    """MTP layers of a layout."""
    return sum(chunk.predictions for chunk in layout_chunks(text))
