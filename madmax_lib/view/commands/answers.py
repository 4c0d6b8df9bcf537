"""How does a command answer a terminal, a pull request, a spreadsheet or a program? One
table, four formats.

`--json` prints one envelope with always the same keys, as compact JSON in one line:

schema    1; another number when a key changes its meaning or goes
command   the command, and version: of the package
status    the exit status: 0 fine, 1 a gate or verdict failed, 2 bad input
error     null, or with status 2 the line that says what is wrong
inputs    what was read: name and sha256 of each file; of what the catalog names, name and null
summary   the headline values of the command, by name
rows      the table, one object a row, keys in the order of the columns
left_out  how many inputs, rows and warnings were left out to stay short; `--all` prints
them warnings  what the terminal would show as warnings

Names carry the units: `_s` seconds, `_bytes` bytes, `_per_s`, `_flops`; shares are 0..1
and bare. Numbers have six digits, what is not finite is null. Without `--all` an
envelope has at most 2,000 tokens, and texts in rows have at most 100 letters.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Answer", "add_command", "envelope", "tokens"]

SCHEMA = 1
_TOKENS = 2000
_ROWS = 40
_LETTERS = 100
_DIGITS = 6
_PIECES = re.compile(r"\d{1,3}|[A-Za-z]{1,6}|[^\sA-Za-z0-9]")


@dataclass(frozen=True)
class Answer:
    """What a command found.

    table: its rows; with `.attrs` of `with_origin` they name the trace files.
    summary: headline values by name, units in the names; texts, numbers, or lists and
    dicts of them. Default: none.
    names: inputs that are no trace files, such as a model of the catalog. Default:
    none.
    passed: false where a verdict or a gate failed, which makes the exit status 1.
    Default: true.
    """

    table: pd.DataFrame
    summary: Mapping[str, Any] = field(default_factory=dict)
    names: Sequence[str] = ()
    passed: bool = True


def add_command(
    commands, name: str, answer: Callable[[Namespace], Answer], **about
) -> ArgumentParser:
    """A parser for `name` with the formats, whose command prints what `answer` gives
    for its options.
    """
    parser = commands.add_parser(name, **about)
    formats = parser.add_mutually_exclusive_group()
    for kind, text in (
        ("json", "one envelope, at most 2,000 tokens"),
        ("csv", "all rows"),
        ("markdown", "a table"),
    ):
        formats.add_argument(
            f"--{kind}",
            dest="format",
            action="store_const",
            const=kind,
            help=f"print {kind}: {text}",
        )
    parser.add_argument("--all", action="store_true", help="leave no row out")
    parser.set_defaults(command=partial(_print_answer, name, answer), format="text")
    return parser


def envelope(
    command: str,
    answer: Answer | Exception,
    caught: Sequence[str] = (),
    *,
    whole: bool = False,
) -> str:
    """JSON of an answer, or of the error in its place, as the module describes it.
    caught: texts of warnings.
    """
    from madmax_lib import __version__

    failed = isinstance(answer, Exception)
    lists = {"inputs": [], "rows": [], "warnings": list(caught)}
    if not failed:
        files = answer.table.attrs.get("provenance", {}).get("files", {})
        lists["inputs"] = [*_inputs(files), *map(_named, answer.names)]
        names = list(map(str, answer.table.columns))
        lists["rows"] = [
            dict(zip(names, row, strict=True))
            for row in answer.table.itertuples(index=False, name=None)
        ]
    head = {
        "schema": SCHEMA,
        "command": command,
        "version": __version__,
        "status": 2 if failed else int(not answer.passed),
        "error": str(answer) if failed else None,
    }
    summary = (
        {} if failed else _plain(answer.summary, math.inf if whole else 4 * _LETTERS)
    )
    lists, left_out = _short(lists, tokens(_json(summary)), whole)
    rest = {
        "inputs": lists["inputs"],
        "summary": summary,
        "rows": lists["rows"],
        "left_out": left_out,
    }
    return _json({**head, **rest, "warnings": lists["warnings"]})


def tokens(text: str) -> int:
    """Tokens that a language model makes of a text, rather too many: three digits, six
    letters or a sign each.

    >>> tokens('{"rank":0,"exposed_comm_s":0.00125}')
    21
    """
    return sum(
        1 if piece.isascii() else len(piece.encode()) for piece in _PIECES.findall(text)
    )


def _print_answer(
    command: str, answer: Callable[[Namespace], Answer], options: Namespace
) -> int:
    """Print in the format asked for; bad input is raised, and as JSON said in an
    envelope too.
    """
    if options.format != "json":
        result = answer(options)
        print(_SHOWN[options.format](result, options.all))
        return int(not result.passed)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        try:
            result = answer(options)
        except (OSError, ValueError, ImportError) as error:
            result = error
    print(
        envelope(
            command,
            result,
            [str(warning.message) for warning in caught],
            whole=options.all,
        )
    )
    if isinstance(result, Exception):
        raise result
    return int(not result.passed)


def _inputs(files: Mapping, side: str = "") -> Iterator[dict]:
    """The files of a provenance, which names those of a comparison by side."""
    for label, file in files.items():
        if isinstance(file, Mapping) and isinstance(file.get("sha256"), str):
            yield {"name": f"{side}{file.get('name', label)}", "sha256": file["sha256"]}
        elif isinstance(file, Mapping):
            yield from _inputs(file, f"{label}: ")


def _named(name: str) -> dict:
    """A file with its sha256, what is no file without."""
    path = Path(name)
    return {
        "name": name,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_file()
        else None,
    }


def _plain(value: Any, letters: float = math.inf) -> Any:
    """As JSON has it: numbers of Python with six digits, null for what is not finite,
    longer texts cut.
    """
    if isinstance(value, Mapping):
        return {str(name): _plain(inner, letters) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner, letters) for inner in value]
    value = value.item() if hasattr(value, "item") else value
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        value = float(f"{value:.{_DIGITS}g}")
        return int(value) if value.is_integer() and abs(value) < 2**53 else value
    text = str(value)
    return text if len(text) <= letters else f"{text[: int(letters) - 1]}…"


def _short(
    lists: dict[str, list], used: int, whole: bool
) -> tuple[dict[str, list], dict[str, int]]:
    """As many of each list as fit beside `used` tokens, and how many were left out;
    rows are the last to go.
    """
    kept = {}
    room = math.inf if whole else _TOKENS - 100 - used
    for name, share in (("inputs", 0.25), ("warnings", 0.33), ("rows", 1.0)):
        kept[name] = []
        part = room * share
        letters = _LETTERS if name == "rows" else 4 * _LETTERS
        for row in lists[name]:
            row = _plain(row, math.inf if whole else letters)
            cost = tokens(_json(row)) + 1
            if cost > part:
                break
            kept[name].append(row)
            part = part - cost
            room = room - cost
    return kept, {name: len(rows) - len(kept[name]) for name, rows in lists.items()}


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _cells(answer: Answer, whole: bool) -> tuple[list[str], list[list[str]], int]:
    """Names of the columns, the rows as short texts, and how many rows were left out."""
    table = answer.table if whole else answer.table.head(_ROWS)
    rows = [list(map(_cell, row)) for row in table.itertuples(index=False, name=None)]
    return list(map(str, table.columns)), rows, len(answer.table) - len(table)


def _cell(value: Any) -> str:
    value = _plain(value, _LETTERS)
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return " ".join(str(value).split())
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def _text(answer: Answer, whole: bool) -> str:
    """The headline values, then the table with numbers to the right."""
    names, rows, left_out = _cells(answer, whole)
    columns = [[name, *cells] for name, *cells in zip(names, *rows, strict=True)]
    numeric = [answer.table[name].dtype.kind in "iuf" for name in answer.table.columns]
    for column, right in zip(columns, numeric, strict=True):
        width = max(map(len, column))
        column[:] = [
            cell.rjust(width) if right else cell.ljust(width) for cell in column
        ]
    lines = (
        ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]
        if rows
        else []
    )
    return "\n".join([*_headlines(answer), *lines, *_rest(left_out)])


def _markdown(answer: Answer, whole: bool) -> str:
    """The headline values as a list, then a table as GitHub draws it."""
    names, rows, left_out = _cells(answer, whole)
    numeric = [answer.table[name].dtype.kind in "iuf" for name in answer.table.columns]
    table = [names, ["---:" if right else "---" for right in numeric], *rows]
    lines = [
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
        for cells in table
    ]
    head = [f"- {line}" for line in _headlines(answer)]
    return "\n".join(
        [
            *head,
            *([""] if head else []),
            *lines,
            *([""] if left_out else []),
            *_rest(left_out),
        ]
    )


def _headlines(answer: Answer) -> list[str]:
    values = _plain(answer.summary)
    return [
        f"{name}: {_line(value)}"
        for name, value in values.items()
        if value not in (None, "", [], {})
    ]


def _line(value: Any) -> str:
    if isinstance(value, dict) and {*value} == {"middle", "low", "high"}:
        return "{middle} ({low} to {high})".format(
            **{name: _line(inner) for name, inner in value.items()}
        )
    if isinstance(value, dict):
        return ", ".join(f"{name} {_line(inner)}" for name, inner in value.items())
    if isinstance(value, list):
        return "; ".join(map(_line, value))
    return " ".join(value.split()) if isinstance(value, str) else _cell(value)


def _rest(left_out: int) -> list[str]:
    return [f"... and {left_out:,} rows more (--all)"] if left_out else []


def _csv(answer: Answer, whole: bool) -> str:
    return answer.table.to_csv(index=False).rstrip("\n")


_SHOWN = {"text": _text, "markdown": _markdown, "csv": _csv}
