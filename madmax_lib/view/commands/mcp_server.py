"""Tools of an MCP server on standard input, for coding agents: the commands that answer
in JSON.

Every answer is the envelope of `view.commands.answers`. The tools read traces, dumps,
configurations and calibrations below the folders that the server was started with, and
write nothing. Needs the package `mcp` (extra `mcp`).
"""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mcp.server import MCPServer

__all__ = ["server"]

# what a command prints is taken from the process's own standard output
_ONE_AT_A_TIME = Lock()


def server(folders: list[str | Path], main: Callable[[list[str]], int]) -> MCPServer:
    """A server whose tools read below these folders; `.run("stdio")` serves. main: runs
    a command line, printing.

    Raises ImportError without the package mcp, and FileNotFoundError for a folder that
    is not there.
    """
    try:
        from mcp.server import MCPServer
    except ImportError:
        raise ImportError(
            "the MCP server needs the package mcp: pip install 'madmax-workbench[mcp]'"
        ) from None
    roots = [Path(folder).expanduser().resolve() for folder in folders]
    if lost := [root for root in roots if not root.is_dir()]:
        raise FileNotFoundError(f"{lost[0]}: no such directory")
    about = (
        "Distributed-training performance: traces analysed, steps predicted, "
        "plans searched. Files are read below "
    )
    places = ", ".join(map(str, roots))
    mcp = MCPServer("madmax", instructions=f"{about}{places}.")
    # one check for all tools
    folders = _Folders(roots)
    ask = partial(_ask, main)
    for tool in (*_trace_tools(folders, ask), *_step_tools(folders, ask)):
        # the envelope is text: as structured output it would be sent twice
        mcp.add_tool(tool, structured_output=False)
    return mcp


class _Folders:
    """The folders that an agent may read in."""

    def __init__(self, roots: list[Path]):
        self.roots = roots

    def inside(self, text: str) -> str:
        """A path below one of the folders; others are refused."""
        path = Path(text).expanduser()
        # links are followed before the check, so that none leads outside
        path = (path if path.is_absolute() else self.roots[0] / path).resolve()
        if not any(path.is_relative_to(root) for root in self.roots):
            raise _refusal(f"{text}: outside of {', '.join(map(str, self.roots))}")
        return str(path)

    def named(self, text: str) -> str:
        """A name of the catalog as it is, a file only inside."""
        is_file = Path(text).suffix == ".json" or Path(text).exists()
        return self.inside(text) if is_file else text


def _trace_tools(folders: _Folders, ask: Callable[..., str]):
    """Tools about recordings; an agent reads their docstrings."""

    def breakdown(traces: list[str]):
        """Compute, communication, exposed communication, idle time and overlap of each
        rank, in seconds.
        """
        return ask("breakdown", *map(folders.inside, traces))

    def compare(a: str, b: str, operations: bool = False):
        """Differences between two runs: by rank and step, or by operation, the largest
        difference first.
        """
        flags = ["--operations"] if operations else []
        return ask("compare", folders.inside(a), folders.inside(b), *flags)

    def stragglers(traces: list[str]):
        """Rank that arrives last at collectives, what it costs the others, and the
        step without stragglers.
        """
        return ask("stragglers", *map(folders.inside, traces))

    def flight(dumps: str):
        """Rank that hangs a job, by a directory of flight-recorder dumps, one per rank."""
        return ask("flight", folders.inside(dumps))

    return [breakdown, compare, stragglers, flight]


def _step_tools(folders: _Folders, ask: Callable[..., str]):
    """Tools about predictions; an agent reads their docstrings."""

    def step(model: str, cluster: str, plans: list[str], global_batch: int, **options):
        options = {"global-batch": global_batch} | options
        # with "=", so that a value that begins with a dash is no flag
        flags = [
            f"--{name}={value}" for name, value in options.items() if value is not None
        ]
        return [folders.named(model), folders.named(cluster), *plans, *flags]

    # the signatures are what an agent sees of a tool: they stay written out
    def estimate(
        model: str,
        cluster: str,
        plans: list[str],
        global_batch: int,
        nodes: int | None = None,
        sequence: int | None = None,
        dtype: str = "bf16",
        software: str | None = None,
    ):
        """Predicted seconds per step with 90 % intervals, memory and MFU of plans such
        as dp2.tp4.pp2.z1.

        model: of the catalog (llama3-70b) or a config.json of Hugging Face. cluster: of
        the catalog (dgx-h100) or a machine.json. software: that trains, such as
        megatron-core or torchtitan.
        """
        options = {"nodes": nodes, "sequence": sequence}
        options |= {"dtype": dtype, "software": software}
        return ask("estimate", *step(model, cluster, plans, global_batch, **options))

    def fits(
        model: str, cluster: str, plan: str, global_batch: int, nodes: int | None = None
    ):
        """Whether a step fits into memory, and what lies where."""
        return ask("fits", *step(model, cluster, [plan], global_batch, nodes=nodes))

    def search(
        model: str,
        cluster: str,
        global_batch: int,
        nodes: int | None = None,
        software: str | None = None,
        objective: str = "time",
    ):
        """The best of all parallel plans for a model on a cluster, by time, cost,
        energy or memory.
        """
        options = {"nodes": nodes, "software": software, "objective": objective}
        return ask("search", *step(model, cluster, [], global_batch, **options))

    return [estimate, fits, search]


def _ask(main: Callable[[list[str]], int], command: str, *arguments: str):
    """The envelope that a command prints; a usage error is refused with its line."""
    printed = io.StringIO()
    errors = io.StringIO()
    with _ONE_AT_A_TIME, redirect_stdout(printed), redirect_stderr(errors):
        try:
            main([command, *arguments, "--json"])
        except SystemExit:  # argparse has printed what is wrong
            raise _refusal(errors.getvalue().strip().splitlines()[-1]) from None
    return printed.getvalue().strip()


def _refusal(text: str):
    """An exception whose text the agent gets; of others the server says no more than
    that there was one.
    """
    from mcp.server.mcpserver.exceptions import ToolError

    return ToolError(text)
