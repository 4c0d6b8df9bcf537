"""Call stacks of snapshots, numbered and named: the line, module and phase that asked
for memory.

The phase is the first that any frame tells: optimizer (a line of torch.optim), backward
(autograd's engine), forward (a function of this name), initialization (a constructor,
loading); "other" where none does.
"""

import re
from functools import lru_cache

import pandas as pd

_LINES = 3  # innermost lines that name a site
_SAMPLED = 8  # stacks are looked up by the identities of each eighth frame
_PLAIN = {str, int, type(None)}
# between the lines of a model, and of no help: a call of a module is three such lines
_PLUMBING = re.compile(
    r"torch/(nn/modules/module|utils/_contextlib|autograd/function)\.py|<frozen "
)
# by lines of a stack, "file.py:17 name", in order of precedence: the optimizer may be
# called inside of a backward pass (hooks), which may run inside of forward (recompute)
_PHASES = {
    "optimizer": r"torch/optim/|optim.*:\d+ (step|_init_group)$",
    "backward": r"torch::autograd::Engine::|_engine_run_backward|[ :]backward$",
    "forward": r" forward$",
    "initialization": r" (__init__|_apply|load_state_dict|from_pretrained|"
    r"_materialize|init_weights)$",
}
_PHASE = re.compile(
    "|".join(f"(?P<{name}>{pattern})" for name, pattern in _PHASES.items())
)
_GRADIENT = re.compile(r"autograd::generated::(\w+)::apply")
_OPERATOR = re.compile(r"at::_ops::(\w+?)(_\w+)?::")


class _Mark:
    """Number of a stack, in its list of frames instead of them."""

    __slots__ = ("number",)

    def __init__(self, number):
        self.number = number


class Stacks:
    """Numbers of stacks and of texts. Lists of frames that are given are emptied but
    for a mark of their number.
    """

    def __init__(self):
        self.texts = {}  # numbers by text
        self._stacks = {}  # marks by lines
        self.forget()

    def forget(self) -> None:
        """Forget objects by their identity: those of another file have others."""
        # by length and the identities of some frames: the stacks that have these, each
        # with its mark
        self._seen = {}
        # by the identity of a frame: the frame, which must live as long, and its line
        self._lines = {}

    def number(self, frames: list | None) -> int:
        """Number of a stack, -1 without frames."""
        if not frames:
            return -1
        if type(frames[0]) is not _Mark:
            key = (len(frames), *map(id, frames[::_SAMPLED]))
            likely = self._seen.setdefault(key, [])
            # lists of the same objects compare fast: Python looks at identities first
            mark = next((mark for others, mark in likely if others == frames), None)
            if not mark:
                lines = tuple(self._line(frame) for frame in frames)
                mark = self._stacks.setdefault(lines, _Mark(len(self._stacks)))
                likely.append((frames[:], mark))
            frames[:] = [mark]  # the file shares lists: the next event finds the mark
        return frames[0].number

    def text(self, text: str | None) -> int:
        """Number of a text, -1 without."""
        return self.texts.setdefault(text, len(self.texts)) if text else -1

    def _line(self, frame):
        if id(frame) not in self._lines:
            if not {type(value) for value in frame.values()} <= _PLAIN:
                raise TypeError("a frame with values other than text and numbers")
            line = f"{frame['filename']}:{frame['line']} {frame['name']}"
            # with the frame: its identity is another's once it is gone
            self._lines[id(frame)] = (frame, line)
        return self._lines[id(frame)][1]

    def table(self) -> pd.DataFrame:
        """A row for each number: site, module, phase, frames (as text, the innermost
        first).
        """
        rows = []
        for lines in self._stacks:
            # where the innermost forward() stands: frames tell no classes
            forwards = [
                ln for ln in lines if ln.endswith(" forward") and _is_python(ln)
            ]
            module = forwards[0].removesuffix(" forward") if forwards else ""
            phases = {_phase_of_line(line) for line in lines}
            phase = next((phase for phase in _PHASES if phase in phases), "other")
            rows.append((_site(lines), _short(module), phase, lines))
        return pd.DataFrame(rows, columns=["site", "module", "phase", "frames"])


def _site(lines):
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
        # a gradient has no line of its own: its name stands before the caller's lines
        return " < ".join([gradient, *python[:_LINES]] if gradient else python[:_LINES])
    return gradient or f"aten::{_first(_OPERATOR, lines) or '?'}"


@lru_cache(1 << 16)
def _phase_of_line(line):
    match = _PHASE.search(line)
    return match and match.lastgroup


def _first(pattern, lines):
    return next((match[1] for line in lines if (match := pattern.search(line))), "")


def _is_python(line):
    return ".py:" in line or line.startswith("<")


def _short(line):
    """A line with the last folder and the name of its file."""
    return re.sub(r"^.*/(?=[^/]+/[^/]+:\d+)", "", line)
