"""python -m madmax_lib run | report | breakdown | search | train | calibrate ...: the
workbench without a notebook.
"""

import argparse
import gc
import os
import re
import runpy
import sys
import warnings
from importlib import import_module
from pathlib import Path

from madmax_lib import __version__
from madmax_lib.view.commands import commands as runs_commands
from madmax_lib.view.commands.answers import add_parser, envelope, error_line


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit status. Bad input is one line on standard error
    and status 2.
    """
    if arguments is None:
        arguments = sys.argv[1:]
    # a script that is recorded keeps Python's ways with garbage and warnings
    is_recorded = arguments[:1] == ["record"]
    if not is_recorded:
        # what a command makes lives to its end: to look for garbage in it costs a tenth
        # of the time of a short one
        gc.set_threshold(100_000)
    options = None
    status = 0
    try:
        options, left = _parser(arguments).parse_known_args(arguments)
        # traces may stand on both sides of an option, as in `compare A --gate 3% B`
        flags = [text for text in left if text.startswith("-")]
        if flags or (left and "traces" not in options):
            options.parser.error(f"unrecognized arguments: {' '.join(left)}")
        if left:
            options.traces += left
        with warnings.catch_warnings():
            if not is_recorded:
                warnings.showwarning = _shown_once()
            status = options.command(options)
            sys.stdout.flush()
            return status
    except BrokenPipeError:  # `| head` has read what it wants
        # else Python complains once more when it closes standard output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return status
    except (OSError, ValueError, ImportError) as error:
        line = error_line(error, options.parser) if options else error
        print(f"madmax: {line}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("madmax: interrupted", file=sys.stderr)
        return 130  # 128 + SIGINT, as shells have it


def _shown_once():
    """A `warnings.showwarning` that prints each line once."""
    lines = set()

    def show(message, *_):
        if (line := f"madmax: warning: {message}") not in lines:
            lines.add(line)
            print(line, file=sys.stderr)

    return show


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage, and in an envelope where one
    is asked for.
    """

    # argparse makes the parsers of commands itself: this one is shared by all of them
    json = False

    def __init__(self, **options):
        super().__init__(**options)
        # -3% and -15e12 are values too, which are refused as such
        self._negative_number_matcher = re.compile(r"-\.?\d")

    def error(self, message):
        line = f"{message}; {self.prog} --help says more"
        if _Parser.json:
            print(envelope(self.prog.split()[-1], ValueError(line)))
        self.exit(2, f"{self.prog}: {line}\n")


def _parser(words):
    """The parser of a command line; some help depends on the words of it."""
    _Parser.json = "--json" in words
    parser = _Parser(prog="madmax", description="MAD-Max Workbench", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="command")
    run = add_parser(commands, "run", _run)
    run.epilog = _parameters(words)
    run.formatter_class = argparse.RawDescriptionHelpFormatter
    run.add_argument(
        "-p",
        "--parameter",
        help="set a parameter",
        action="append",
        default=[],
        metavar="NAME=VALUE",
    )

    add_parser(commands, "site", _site)
    for name in ("trace", "step", "run"):
        # a command does without what the others import
        if not {*words[:1]} & {*commands.choices}:
            import_module(f"madmax_lib.view.commands.{name}").add(commands)
    runs_commands.add(commands, words[:1])
    if not words or words[0] in ("paper", "-h", "--help"):
        from madmax_lib.papers import command as paper_command  # the top floor

        paper_command.add(commands)
    return parser


def _parameters(words):
    """The parameters of the notebook that `run NAME --help` asks about."""
    names = [word for word in words[1:] if not word.startswith("-")]
    asks = words[:1] == ["run"] and bool({"-h", "--help"} & set(words))
    if not asks or not names:
        return "run NAME --help lists the parameters of a notebook"
    from madmax_lib.view.notebooks.runner import described, notebook_named

    return described(notebook_named(names[0]))


def _run(options):
    from madmax_lib.catalog.datasets import PROJECT, SHIPPED
    from madmax_lib.view.notebooks.runner import (
        notebook_named,
        notebooks,
        parse_parameters,
        questions,
    )

    if options.list:
        for name, question in questions().items():
            print(f"{name:<30}{question}")
        return 0
    if options.notebook is None:
        chosen = list(notebooks().values())
    else:
        chosen = [notebook_named(options.notebook)]
    if options.parameter and len(chosen) > 1:
        raise ValueError("-p needs the name of one notebook")
    parameters = {"quick": True}
    if options.parameter:
        parameters = parse_parameters(chosen[0], options.parameter)
    build = _folder(options.output or _build())
    # only a default run in a checkout redraws the committed figures
    is_default = not options.parameter and not options.output
    figures = build / "figures"
    if is_default and SHIPPED == PROJECT:
        figures = PROJECT / "figures"
    results = _execute(chosen, parameters, build, figures)
    print(f"executed notebooks and HTML in {build}, figures in {figures}")
    return int(any(result.error for result in results))


def _site(options):
    from madmax_lib.catalog import PROJECT
    from madmax_lib.view.notebooks.runner import notebooks

    # before anything runs: only a checkout has it
    script = runpy.run_path(str(PROJECT / "docs" / "site.py"))
    paths = notebooks()
    build = _build()
    folder = _folder(options.output or build / "site")
    results = _execute(list(paths.values()), {"quick": True}, build, build / "figures")
    print(script["write_site"](results, folder))
    return int(any(result.error for result in results))


def _build():
    """Folder of what notebooks write: of the checkout, else of the working folder."""
    # an installed package ships its notebooks elsewhere than beside itself
    from madmax_lib.catalog.datasets import PROJECT, SHIPPED

    return (PROJECT if SHIPPED == PROJECT else Path.cwd()) / "build"


def _folder(path):
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"{path}: is a file, give the name of a folder")
    # made at once: what cannot be written to is said before anything runs
    path.mkdir(parents=True, exist_ok=True)
    return path.resolve()


def _execute(paths, parameters, build, figures):
    """Run notebooks one after another and print how each went."""
    from madmax_lib.base.progress import bar
    from madmax_lib.view.notebooks.runner import run_notebook

    # of one notebook the bar counts cells, of several notebooks
    is_single = len(paths) == 1
    folders = {"build": build, "figures": figures}
    folders["progress"] = is_single and sys.stderr.isatty()
    results = []
    notebooks = bar(paths, desc="notebooks", unit="nb", show=not is_single)
    for path in notebooks:
        notebooks.set_postfix_str(path.stem)
        results.append(run_notebook(path, parameters, **folders))
    width = max(len(path.stem) for path in paths)
    print(f"{'notebook':<{width}}  seconds  figures  status")
    for result in results:
        status = f"failed: {result.error}" if result.error else "ok"
        # the copy has a number where another run wrote to the same folder
        if result.output.stem != result.name:
            status += f", as {result.output.stem}"
        numbers = f"{result.seconds:7.1f}  {len(result.figures):7d}"
        print(f"{result.name:<{width}}  {numbers}  {status}")
    return results


if __name__ == "__main__":
    sys.exit(main())
