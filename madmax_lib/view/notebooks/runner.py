"""Headless runs of notebooks: papermill, with parameters that are checked before
anything starts.
"""

import ast
import builtins
import difflib
import itertools
import os
import tempfile
import time
import warnings
from contextlib import contextmanager
from pathlib import Path

from madmax_lib.base.atomic import write_text
from madmax_lib.catalog import SHIPPED
from madmax_lib.view.notebooks.page import Result

# set to 1: fits solve small systems, in whose way more threads get
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_USUAL = ["00_tour", "01_explore"]  # named where nothing is near


def notebooks() -> dict[str, Path]:
    """Notebooks of the project by name, in order. Raises FileNotFoundError where they
    are not.
    """
    folder = SHIPPED / "notebooks"
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder}: no such directory; install the workbench with pip, or from a "
            "checkout"
        )
    return {path.stem: path for path in sorted(folder.glob("*.ipynb"))}


def notebook_named(text: str) -> Path:
    """The notebook of a name, or the only one whose name begins so. Raises ValueError
    with the nearest names.
    """
    paths = notebooks()
    stem = Path(text).stem
    if stem in paths:
        return paths[stem]
    begin = [name for name in paths if name.startswith(stem)] if stem else []
    if len(begin) == 1:
        return paths[begin[0]]
    near = begin or difflib.get_close_matches(stem, paths, n=3, cutoff=0.5) or _USUAL
    raise ValueError(
        f"no notebook {text!r}; nearest: {', '.join(near)}; `madmax run --list` "
        "names them all"
    )


def questions() -> dict[str, str]:
    """Question that each notebook answers: its bold one, or its title."""
    import nbformat

    from madmax_lib.view.notebooks.site import notebook_question

    return {
        name: notebook_question(nbformat.read(path, as_version=4))
        for name, path in notebooks().items()
    }


def described(path: Path) -> str:
    """Lines about the parameters of a notebook: name, type, default and help."""
    lines = [f"parameters of {path.stem}:"]
    for name, about in _declared_parameters(path).items():
        default = f"{about['inferred_type_name']} = {about['default']}"
        lines.append(f"  {name}: {default}  {about['help']}".rstrip())
    return "\n".join(lines)


def _declared_parameters(path):
    """Parameters of a notebook's tagged cell: {name: {inferred_type_name, default,
    help}}.
    """
    with _quiet():
        import papermill

        declared = papermill.inspect_notebook(str(path))
    for about in declared.values():
        # a type in quotes, as `"Path"`, keeps them in papermill's answer
        about["inferred_type_name"] = about["inferred_type_name"].strip("'\" ")
    return declared


def parse_parameters(path: Path, pairs: list[str]) -> dict:
    """Typed values of `name=value` texts. Raises ValueError that lists the parameters
    with type and help.
    """
    declared = _declared_parameters(path)
    values = {}
    try:
        for pair in pairs:
            name, equals, text = pair.partition("=")
            if not equals:
                raise ValueError(f"parameter {pair!r} is not of the form name=value")
            if name not in declared:
                raise ValueError(f"{path.stem} has no parameter {name!r}")
            if name in values:
                raise ValueError(f"parameter {name} is given twice")
            values[name] = _typed(name, text, declared[name]["inferred_type_name"])
    except ValueError as error:
        raise ValueError(f"{error}\n{described(path)}") from None
    return values


def run_notebook(
    path: Path,
    parameters: dict,
    *,
    build: Path,
    figures: Path | None = None,
    progress=False,
) -> Result:
    """Execute a notebook in the current folder; the executed copy and its HTML go to
    `build`, also when a cell fails.

    figures: folder for the figures, the notebook's own choice if None. While another
    run of the notebook writes to `build`, the names of this one end in -2, and so on,
    as do `build/figures`.
    """
    build.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    with (
        _quiet(),
        _locked_copy(build, path.stem) as (output, number),
        tempfile.TemporaryDirectory() as folder,
    ):
        from madmax_lib.view.notebooks.site import notebook_page

        log = Path(folder) / "figures.txt"  # names of the figures that are saved
        env = {name: os.environ.get(name, "1") for name in _THREADS}
        env["MADMAX_FIGURE_LOG"] = str(log)
        if figures:
            env["MADMAX_FIGURES"] = str(
                build / f"figures-{number}" if number > 1 else figures
            )
        with _environment(env):
            error = _execute(path, output, parameters, progress)
        seconds = time.perf_counter() - started
        written = log.read_text().splitlines() if log.exists() else []
        write_text(output.with_suffix(".html"), notebook_page(output))
    return Result(path.stem, output, seconds, written, error)


def _execute(path, output, parameters, progress):
    """Execute a notebook; returns the first line of the error of a failed cell."""
    import papermill
    from nbclient.exceptions import CellTimeoutError, DeadKernelError

    try:
        papermill.execute_notebook(
            str(path),
            str(output),
            parameters,
            progress_bar=progress,
            kernel_name="python3",
            cwd=str(Path.cwd()),
            extra_arguments=["--log-level=ERROR"],  # no remarks at its start
        )
    except papermill.exceptions.PapermillExecutionError as failure:
        error = f"{failure.ename}: {failure.evalue}"
    except (DeadKernelError, CellTimeoutError) as failure:
        # the kernel was killed, for want of memory perhaps
        error = f"{type(failure).__name__}: {failure}"
    else:
        return ""
    return "".join(error.strip().splitlines()[:1])


def _typed(name, text, kind):
    if kind in ("str", "None", ""):
        return text
    wanted = getattr(builtins, kind.split("[")[0], None)
    try:
        value = ast.literal_eval(text.capitalize() if wanted is bool else text)
        # 2 is a float where one is wanted; True is no int
        if wanted is float and type(value) is int:
            return float(value)
        if wanted in (None, type(value)):
            return value
    except (ValueError, SyntaxError):
        pass
    raise ValueError(f"{name}={text!r} is not of type {kind}")


@contextmanager
def _locked_copy(build, name):
    """The path of an executed notebook that no other process writes, and its number
    from 1.
    """
    import fcntl  # not on Windows

    for number in itertools.count(1):
        stem = f"{name}-{number}" if number > 1 else name
        output = build / f"{stem}.ipynb"
        with output.open("a") as handle:
            try:
                # held until the handle is closed, also by a process that dies
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # another run writes this copy
                continue
            except OSError:  # a file system without locks
                pass
            yield output, number
            return


@contextmanager
def _environment(values):
    # a kernel inherits the variables of this process
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _quiet():
    """papermill and nbconvert warn about their own dependencies; none of it is the
    reader's business.
    """
    return warnings.catch_warnings(action="ignore")
