"""Tools of an MCP server on standard input, for coding agents: the commands that answer
in JSON.

Every tool is a command, with the options that it has on a command line; every answer
is the envelope of `view.commands.answers`. The tools read traces, dumps, configurations
and calibrations below the folders that the server was started with, and write nothing.
Needs the package `mcp` (extra `mcp`).
"""

from __future__ import annotations

import io
from argparse import Action, ArgumentParser
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from inspect import Parameter, Signature
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Annotated

from madmax_lib.view.commands import step, trace

if TYPE_CHECKING:
    from mcp.server import MCPServer

_TOOLS = ("breakdown", "compare", "stragglers", "flight", "estimate", "fits", "search")
_PATHS = ("traces", "dumps")  # of files, which have to lie inside of the folders
_NAMES = ("model", "cluster")  # of the catalog, or of a file inside
# options that write a file, or whose answer is not the short envelope
_NOT_ASKED = ("help", "format", "all", "output", "save_baseline")
# what a command prints is taken from the process's own standard output
_ONE_AT_A_TIME = Lock()


def server(folders: list[str | Path], main: Callable[[list[str]], int]) -> MCPServer:
    """A server whose tools read below these folders; `.run("stdio")` serves. main: runs
    a command line, printing.

    Raises ImportError without the package mcp, and FileNotFoundError for a folder that
    is not there.
    """
    from mcp.server import MCPServer

    roots = [Path(folder).expanduser().resolve() for folder in folders]
    if lost := [root for root in roots if not root.is_dir()]:
        raise FileNotFoundError(f"{lost[0]}: no such directory")
    about = (
        "Distributed-training performance: traces analysed, steps predicted, "
        "plans searched. Files are read below "
    )
    places = ", ".join(map(str, roots))
    mcp = MCPServer("madmax", instructions=f"{about}{places}.")
    commands = ArgumentParser().add_subparsers()
    for module in (trace, step):
        module.add(commands)
    for name in _TOOLS:
        tool = _tool(commands.choices[name], roots, main)
        # the envelope is text: as structured output it would be sent twice
        about = commands.choices[name].description
        mcp.add_tool(tool, name, description=about, structured_output=False)
    return mcp


def _tool(parser: ArgumentParser, roots: list[Path], main: Callable[[list[str]], int]):
    """A function that asks a command, with the command's options as its signature:
    what an agent sees of it.
    """
    command = parser.prog.split()[-1]
    actions = [each for each in parser._actions if each.dest not in _NOT_ASKED]

    def tool(**values):
        words = [command, "--json"]
        for action in actions:
            words += _words(action, values[action.dest], roots)
        return _printed(main, words)

    tool.__signature__ = Signature(list(map(_parameter, actions)))
    return tool


def _parameter(action: Action):
    """Parameter of a tool that an option of a command becomes."""
    from pydantic import Field

    kind = action.type if action.type in (int, float) else str
    if action.nargs == "+":
        kind = list[str]
    elif action.nargs == 0:  # a flag
        kind = bool
    default = Parameter.empty
    if not action.required:  # what is left out has the command's own default
        kind = kind | None
        default = None
    about = Field(description=(action.help or "").replace("%%", "%"))
    return Parameter(
        action.dest,
        Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, about],
    )


def _words(action: Action, value, roots: list[Path]):
    """Words of a command line that give an option its value."""
    flag = next(iter(action.option_strings), "")
    if flag:
        # with "=", so that a value that begins with a dash is no flag
        words = [flag] if value is True else [f"{flag}={value}"]
        return words if value else []
    texts = value if isinstance(value, list) else [value]
    return [_checked(action.dest, text, roots) for text in texts]


def _checked(name: str, text: str, roots: list[Path]):
    """An argument as it is; where it is the path of a file, the whole path, which has
    to lie below one of the folders.
    """
    is_file = Path(text).suffix == ".json" or Path(text).exists()
    if name not in _PATHS and not (name in _NAMES and is_file):
        return text
    path = Path(text).expanduser()
    # links are followed before the check, so that none leads outside
    path = (path if path.is_absolute() else roots[0] / path).resolve()
    if not any(path.is_relative_to(root) for root in roots):
        raise _refusal(f"{text}: outside of {', '.join(map(str, roots))}")
    return str(path)


def _printed(main: Callable[[list[str]], int], words: list[str]):
    """The envelope that a command prints; a usage error is refused with its line."""
    printed = io.StringIO()
    errors = io.StringIO()
    with _ONE_AT_A_TIME, redirect_stdout(printed), redirect_stderr(errors):
        try:
            main(words)
        except SystemExit:  # argparse has printed what is wrong
            raise _refusal(errors.getvalue().strip().splitlines()[-1]) from None
    return printed.getvalue().strip()


def _refusal(text: str):
    """An exception whose text the agent gets; of others the server says no more than
    that there was one.
    """
    from mcp.server.mcpserver.exceptions import ToolError

    return ToolError(text)
