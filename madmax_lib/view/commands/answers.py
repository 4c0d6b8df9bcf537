"""Answers of commands to a terminal, a pull request, a spreadsheet or a program: one
table, four formats.

`--json` prints one envelope with always the same keys, as compact JSON in one line:

schema    1; another number when a key changes its meaning or goes
command   the command, and version: of the package
status    the exit status: 0 fine, 1 a gate or verdict failed, 2 bad input, 3 cannot tell
error     null, or with status 2 the line that says what is wrong
inputs    what was read: name and sha256 of each file; of what the catalog names, name and null
summary   the headline values of the command, by name
result    findings: who is late, worst first, of commands that look for it
rows      the table, one object a row, keys in the order of the columns
left_out  how many inputs, rows and warnings were left out to stay short; `--all` prints them
warnings  what the terminal would show as warnings

Names carry the units: `_s` seconds, `_bytes` bytes, `_per_s`, `_flops`; shares are 0..1
and bare. Numbers have six digits, what is not finite is null. Without `--all` an
envelope has at most 2,000 tokens, and texts in rows have at most 100 letters.
"""

import csv
import hashlib
import json
import math
import re
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from madmax_lib.base.extras import with_extra

if TYPE_CHECKING:
    import pandas as pd

_SCHEMA = 1
_TOKENS = 2000  # of an envelope
_HEAD_TOKENS = 100  # of its keys, the version and what else is always there
_ROWS = 40  # that a terminal shows
_WIDTH = 100  # and letters of a line, of commands that say which columns come first
_LETTERS = 100  # of a text in a row; texts outside of rows may have four times as many
_DIGITS = 6
# lists of an envelope in the order in which they get their share of the tokens left
_SHARES = {"inputs": 0.25, "warnings": 0.33, "findings": 0.6, "rows": 1.0}
_PIECES = re.compile(r"\d{1,3}|[A-Za-z]{1,6}|[^\sA-Za-z0-9]")
_FORMATS = {
    "json": "one envelope, at most 2,000 tokens",
    "csv": "all rows",
    "markdown": "a table",
}


@dataclass(frozen=True)
class Answer:
    """Result of a command.

    >>> Answer(breakdown(timeline), {"steps": 3}, passed=True)      # doctest: +SKIP
    """

    table: "pd.DataFrame"  # `.attrs` of `with_origin` name the trace files
    # headline values by name, units in the names; texts, numbers, or lists and dicts
    summary: Mapping[str, Any] = field(default_factory=dict)
    names: Sequence[str] = ()  # inputs that are no trace files: models of the catalog
    # False where a verdict or a gate failed, None where nobody can tell
    passed: bool | None = True
    # of who is late, worst first; None for commands that look for nobody
    findings: "pd.DataFrame | None" = None
    # of headline values and columns, most important first, for a terminal without
    # `--all`: other values are left out, other columns where there is room; all if empty
    brief: Sequence[str] = ()

    @property
    def status(self) -> int:
        """Exit status: 0 fine, 1 failed, 3 cannot tell."""
        return 3 if self.passed is None else int(not self.passed)


_DATA = Path(__file__).parents[1] / "data"
# headlines and columns that commands show: what an estimate shows in a terminal first;
# those of a search that are worth a terminal, and that stand first there, of what beats
# a recipe too; what an expectation compares and says, also of its nearest runs; what a
# training is asked for, and of its best plan and first in a terminal; results of a
# calibration; and what only the files of a bench have
COLUMNS = json.loads((_DATA / "columns.json").read_text())


@cache
def _options():
    with (_DATA / "options.csv").open() as file:
        return list(csv.DictReader(file))


def add_parser(
    commands,
    name: str,
    command: Callable[[Namespace], int],
    **kinds: Callable[[str], Any],
) -> ArgumentParser:
    """A parser for a command, with the help texts and the arguments that
    `data/options.csv` lists. kinds: what makes values of texts, by its name there.
    """
    kinds = {"": str, "int": int, "float": float, "path": Path} | kinds
    rows = [row for row in _options() if name in row["commands"].split()]
    texts = {row["name"]: row["help"] for row in rows}
    # of a help text argparse makes one sign of two, of a description it does not
    about = f"{texts['']}. {texts.get('description', '')}".replace("%%", "%")
    parser = commands.add_parser(name, help=texts[""], description=about)
    parser.set_defaults(command=command, parser=parser)
    groups = {"": parser}  # of arguments that exclude each other
    for row in rows:
        group = row["group"]
        if group not in groups:
            groups[group] = parser.add_mutually_exclusive_group(
                required=group.endswith("!")
            )
        how = {"action": "store_true"}
        if row["kind"] != "flag":
            fields = ("default", "metavar", "nargs", "required")
            how = {field: row[field] for field in fields if row[field]}
            how["type"] = kinds[row["kind"]]
        if row["choices"]:
            how["choices"] = row["choices"].split()
        if row["name"] not in ("", "description"):
            groups[group].add_argument(*row["name"].split(), help=row["help"], **how)
    return parser


def add_command(
    commands, answer: Callable[[Namespace], Answer], **kinds: Callable[[str], Any]
) -> None:
    """Add a parser of `add_parser` with the formats, for the command that `answer` is
    named after, which prints what it gives for its options.
    """
    name = answer.__name__.strip("_")
    parser = add_parser(commands, name, partial(_print_answer, name, answer), **kinds)
    formats = parser.add_mutually_exclusive_group()
    flag = {"dest": "format", "action": "store_const"}
    for kind, text in _FORMATS.items():
        formats.add_argument(
            f"--{kind}", const=kind, help=f"print {kind}: {text}", **flag
        )
    parser.add_argument("--all", action="store_true", help="leave no row out")
    parser.set_defaults(format="text")


def error_line(error: Exception, parser: ArgumentParser) -> str:
    """The line of an error of a command: its options stand for the arguments of Python
    that they give, words for numbers of the system.
    """
    text = str(with_extra(error))
    if isinstance(error, OSError) and error.filename:
        text = f"{error.filename}: {error.strerror}"
    flags = set(re.findall(r"--[\w-]+", parser.format_help()))

    def option(match):
        flag = f"--{match[1].replace('_', '-')}"
        # other arguments keep their names
        return " ".join(filter(None, [flag, match[2]])) if flag in flags else match[0]

    # what stands in a call, such as RunSpec(model=...), is Python
    return re.sub(r"(?<!\()\b([a-z_]+)=(?!\.)([\w'-]?)", option, text).strip()


def envelope(
    command: str,
    answer: Answer | Exception,
    caught: Sequence[str] = (),
    *,
    complete: bool = False,
) -> str:
    """JSON of an answer, or of the error in its place, as the module describes it.
    caught: texts of warnings.
    """
    from madmax_lib import __version__

    head = {"schema": _SCHEMA, "command": command, "version": __version__}
    lists = {"inputs": [], "findings": [], "rows": [], "warnings": list(caught)}
    summary = {}
    if isinstance(answer, Exception):
        head |= {"status": 2, "error": str(answer)}
    else:
        head |= {"status": answer.status, "error": None}
        summary = _plain(answer.summary, math.inf if complete else 4 * _LETTERS)
        lists["inputs"] = list(
            _inputs(answer.table.attrs.get("provenance", {}).get("files", {}))
        )
        for name in answer.names:
            sha256 = None  # of a name of the catalog, which is no file
            if (path := Path(name)).is_file():
                sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
            lists["inputs"].append({"name": name, "sha256": sha256})
        if answer.findings is not None:
            lists["findings"] = answer.findings.to_dict("records")
        lists["rows"] = answer.table.rename(columns=str).to_dict("records")
    short = _short(lists, tokens(_json(summary)), complete)
    findings = short.pop("findings")
    is_asked = getattr(answer, "findings", None) is not None
    result = {"findings": findings} if is_asked else {}
    left_out = {name: len(lists[name]) - len(short[name]) for name in short}
    # in the order of reading: what was read, the headline, the table, the rest
    body = {"inputs": short["inputs"], "summary": summary, "result": result}
    body["rows"] = short["rows"]
    return _json(head | body | {"left_out": left_out, "warnings": short["warnings"]})


def tokens(text: str) -> int:
    """Tokens that a language model makes of a text, rather too many: three digits, six
    letters or a sign each.

    >>> tokens('{"rank":0,"exposed_comm_s":0.00125}')
    21
    """
    pieces = _PIECES.findall(text)
    # a sign beyond ASCII is a token for each of its bytes at worst
    return sum(1 if piece.isascii() else len(piece.encode()) for piece in pieces)


def _print_answer(command, answer, options):
    """Print in the format asked for; bad input is raised, and as JSON said in an
    envelope too.
    """
    if options.format != "json":
        result = answer(options)
        if options.format == "csv":
            text = result.table.to_csv(index=False).rstrip("\n")
        else:
            is_markdown = options.format == "markdown"
            text = _written(result, options.all, markdown=is_markdown)
        with suppress(
            BrokenPipeError
        ):  # of `| head`: the status stays that of the answer
            print(text)
        return result.status
    with warnings.catch_warnings(record=True, action="default") as caught:
        error = None
        try:
            result = answer(options)
        except (OSError, ValueError, ImportError) as reason:
            error = reason
            result = ValueError(error_line(error, options.parser))
    print(
        envelope(
            command,
            result,
            [*dict.fromkeys(str(warning.message) for warning in caught)],
            complete=options.all,
        )
    )
    if error:
        raise error
    return result.status


def _inputs(files, side=""):
    """The files of a provenance, which names those of a comparison by side."""
    for label, file in files.items():
        if isinstance(file, Mapping) and isinstance(file.get("sha256"), str):
            yield {"name": f"{side}{file.get('name', label)}", "sha256": file["sha256"]}
        elif isinstance(file, Mapping):
            yield from _inputs(file, f"{label}: ")


def _plain(value, letters=math.inf):
    """A value as JSON has it: numbers of Python with six digits, null for what is not
    finite, longer texts cut.
    """
    if isinstance(value, Mapping):
        return {str(name): _plain(inner, letters) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, letters) for inner in value]
    value = value.item() if hasattr(value, "item") else value  # a number of numpy
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        value = float(f"{value:.{_DIGITS}g}")
        # beyond 2^53 a float does not hold every integer
        return int(value) if value.is_integer() and abs(value) < 2**53 else value
    text = str(value)
    return text if len(text) <= letters else f"{text[: int(letters) - 1]}…"


def _short(lists, used, complete):
    """Entries of each list that fit beside `used` tokens, or all; rows are the last to
    go.
    """
    short = {}
    room = math.inf if complete else _TOKENS - _HEAD_TOKENS - used
    for name, share in _SHARES.items():
        letters = _LETTERS if name == "rows" else 4 * _LETTERS
        letters = math.inf if complete else letters
        part = room * share
        short[name] = []
        for entry in lists[name]:
            entry = _plain(entry, letters)
            cost = tokens(_json(entry)) + 1  # and the comma
            if cost > part:
                break
            short[name].append(entry)
            part -= cost
            room -= cost
    return short


def _json(value):
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _cell(value):
    value = _plain(value, _LETTERS)
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return " ".join(str(value).split())
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def _written(answer, complete, *, markdown):
    """The headline values, then the table with numbers to the right; for GitHub the
    headlines as a list.
    """
    import pandas as pd

    table = answer.table if complete else answer.table.head(_ROWS)
    values = _plain(answer.summary)
    brief = () if complete or markdown else answer.brief
    if brief:
        values = {name: values[name] for name in brief if name in values}
    head = []
    tables = []
    for name, value in values.items():
        # records are a table of their own
        if isinstance(value, list) and value and isinstance(value[0], dict):
            small = _columns(_in_small_units(pd.DataFrame(value)), markdown)
            tables.append([f"{name}:", *[""] * markdown, *_lines(small, markdown)])
        elif value not in (None, "", [], {}):
            head.append(f"{'- ' * markdown}{name}: {_line(value)}")
    columns = _columns(table, markdown)
    if brief:
        columns = _narrow(columns, table, brief)
    lines = _lines(columns, markdown) if len(table) else []
    left_out = len(answer.table) - len(table)
    rest = [f"... and {left_out:,} more rows (--all)"] if left_out else []
    if len(columns) < table.shape[1]:
        rest.append("more columns: --all")
    # an empty line before and behind a table of Markdown, without which it is none
    parts = ["\n".join(part) for part in (head, *tables, lines, rest) if part]
    return ("\n\n" if markdown else "\n").join(parts)


def _columns(table, markdown):
    """Header and cells of each column by its name, numbers to the right."""
    columns = {}
    for name, column in table.items():
        is_number = column.dtype.kind in "iuf"
        cells = [str(name), *map(_cell, column)]
        if markdown:
            cells.insert(1, "---:" if is_number else "---")
            cells = [cell.replace("|", r"\|") for cell in cells]
        width = 0 if markdown else max(map(len, cells))
        align = str.rjust if is_number else str.ljust
        columns[name] = [align(cell, width) for cell in cells]
    return columns


def _lines(columns, markdown):
    rows = list(zip(*columns.values(), strict=True))
    if markdown:
        return [f"| {' | '.join(row)} |" for row in rows]
    return ["  ".join(row).rstrip() for row in rows]


def _in_small_units(table):
    """The table with ms for s and MiB for bytes."""
    units = {"_s": ("_ms", 1e3), "_bytes": ("_mib", 2.0**-20)}
    names = {}
    for name in table.select_dtypes("number"):
        for ending, (unit, factor) in units.items():
            if name.endswith(ending) and not name.endswith("per_s"):
                table[name] = table[name] * factor
                names[name] = name.removesuffix(ending) + unit
    return table.rename(columns=names)


def _narrow(columns, table, first):
    """Texts of the columns that fit into a terminal: the first ones, then the longest
    seconds, whose ends are among the first or not worth it.
    """
    seconds = (
        table.filter(regex="(?<!low)(?<!high)_s$").max().sort_values(ascending=False)
    )
    order = dict.fromkeys([*first, *seconds[seconds > 0].index])
    # half of the room is for others than the first column, which is always there
    room = _WIDTH // 2
    fits = set()
    for name in filter(columns.__contains__, order):
        width = len(columns[name][0]) + 2
        if not fits:
            fits.add(name)
            room = max(room, _WIDTH - width)
        elif width <= room:
            room -= width
            fits.add(name)
    return {name: columns[name] for name in table if name in fits}


def _line(value):
    if isinstance(value, dict):
        texts = {name: _line(inner) for name, inner in value.items()}
        if {*value} == {"middle", "low", "high"}:
            return "{middle} ({low} to {high})".format(**texts)
        return ", ".join(f"{name} {text}" for name, text in texts.items())
    if isinstance(value, list):
        return "; ".join(map(_line, value))
    return " ".join(value.split()) if isinstance(value, str) else _cell(value)
