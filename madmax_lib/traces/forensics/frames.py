"""Which line, module and phase asked for memory? Call stacks of snapshots, numbered and
named.

The phase is the first that any frame tells: optimizer (a line of torch.optim), backward
(autograd's engine), forward (a function of this name), initialization (a constructor,
loading); "other" where none does.
"""

import re
from collections.abc import Iterable
from functools import lru_cache

import pandas as pd

__all__ = ["Stacks"]

# lines of a stack that tell it from others; each so manyth frame finds those like it
_LINES = 3
_SAMPLED = 8
_PLAIN = {str, int, type(None)}
_PLUMBING = re.compile(
    r"torch/(nn/modules/module|utils/_contextlib|autograd/function)\.py|<frozen "
)
_PHASES = {
    "optimizer": r"torch/optim/|optim.*:\d+ (step|_init_group)$",
    "backward": r"torch::autograd::Engine::|_engine_run_backward|[ :]backward$",
    "forward": r" forward$",
    "initialization": (
        r" "
        r"(__init__|_apply|load_state_dict|from_pretrained|_materialize|init_weights)$"
    ),
}
_PHASE = re.compile(
    "|".join(f"(?P<{name}>{pattern})" for name, pattern in _PHASES.items())
)
_GRADIENT = re.compile(r"autograd::generated::(\w+)::apply")
_OPERATOR = re.compile(r"at::_ops::(\w+?)(_\w+)?::")


class _Mark:
    """Stands in a list of frames for what was in it: the number of the stack."""

    __slots__ = ("number",)

    def __init__(self, number: int):
        self.number = number


class Stacks:
    """Numbers of stacks and of texts. Lists of frames that are given are emptied but
    for a mark of their number.
    """

    def __init__(self):
        self.texts: dict[str, int] = {}
        self._stacks: dict[tuple[str, ...], _Mark] = {}
        self.forget()

    def forget(self) -> None:
        """What is known of objects: those of another file have other identities."""
        self._known: dict[tuple[int, ...], list[tuple[list[dict], _Mark]]] = {}
        self._lines: dict[int, tuple[dict, str]] = {}

    def number(self, frames: list | None) -> int:
        """Number of a stack, -1 without frames."""
        if not frames:
            return -1
        if type(frames[0]) is not _Mark:
            likely = self._known.setdefault(
                (len(frames), *map(id, frames[::_SAMPLED])), []
            )
            mark = next((mark for known, mark in likely if known == frames), None)
            if not mark:
                mark = self._stacks.setdefault(
                    tuple(map(self._line, frames)), _Mark(len(self._stacks))
                )
                likely.append((frames[:], mark))
            frames[:] = [mark]
        return frames[0].number

    def text(self, text: str | None) -> int:
        """Number of a text, -1 without."""
        return self.texts.setdefault(text, len(self.texts)) if text else -1

    def _line(self, frame: dict) -> str:
        if id(frame) not in self._lines:
            if not {type(value) for value in frame.values()} <= _PLAIN:
                raise TypeError("a frame with other than texts and numbers")
            line = f"{frame['filename']}:{frame['line']} {frame['name']}"
            self._lines[id(frame)] = (
                frame,
                line,
            )  # the frame too: its identity is another's once it is gone
        return self._lines[id(frame)][1]

    def table(self) -> pd.DataFrame:
        """A row for each number: site, module, phase, frames (as text, the innermost
        first).
        """
        rows = [
            (_site(lines), _module(lines), _phase(lines), lines)
            for lines in self._stacks
        ]
        return pd.DataFrame(rows, columns=["site", "module", "phase", "frames"])


def _site(lines: tuple[str, ...]) -> str:
    """The innermost lines of Python, else the gradient or the operator that the frames
    of C++ name.
    """
    python = [
        _short(line)
        for line in lines
        if _is_python(line) and not _PLUMBING.search(line)
    ]
    gradient = _first(_GRADIENT, lines)
    if python:
        return " < ".join([*([gradient] if gradient else []), *python[:_LINES]])
    return gradient or f"aten::{_first(_OPERATOR, lines) or '?'}"


def _module(lines: tuple[str, ...]) -> str:
    """Where the innermost forward() stands, "" without: frames tell no classes."""
    inside = [line for line in lines if line.endswith(" forward") and _is_python(line)]
    return _short(inside[0].removesuffix(" forward")) if inside else ""


def _phase(lines: tuple[str, ...]) -> str:
    told = set(map(_phase_of_line, lines))
    return next((phase for phase in _PHASES if phase in told), "other")


@lru_cache(1 << 16)
def _phase_of_line(line: str) -> str | None:
    match = _PHASE.search(line)
    return match and match.lastgroup


def _first(pattern: re.Pattern, lines: Iterable[str]) -> str:
    return next((match[1] for line in lines if (match := pattern.search(line))), "")


def _is_python(line: str) -> bool:
    return ".py:" in line or line.startswith("<")


def _short(line: str) -> str:
    """A line with the last folder and the name of its file."""
    return re.sub(r"^.*/(?=[^/]+/[^/]+:\d+)", "", line)
