"""How does a notebook run headless? papermill, with parameters that are checked before anything starts."""

from __future__ import annotations

import ast
import os
import tempfile
import time
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from madmax_lib.atomic import replacing
from madmax_lib.datasets import PROJECT

__all__ = ["Result", "declared_parameters", "notebooks", "parse_parameters", "run_notebook"]

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")  # fits solve small systems: more threads get in their way
_TYPES = {"bool": bool, "int": int, "float": float, "str": str, "list": list, "dict": dict}


@dataclass
class Result:
    """One executed notebook: its copy in build/, seconds it ran, figures written, the error of a failed cell."""

    name: str
    output: Path
    seconds: float
    figures: list[str] = field(default_factory=list)
    error: str = ""


def notebooks() -> dict[str, Path]:
    """Notebooks of the project by name, in order. Raises FileNotFoundError outside of a checkout."""
    folder = PROJECT / "notebooks"
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no notebooks here; run from a git checkout of the workbench")
    return {path.stem: path for path in sorted(folder.glob("*.ipynb"))}


def declared_parameters(path: Path) -> dict[str, dict]:
    """Parameters of a notebook's tagged cell: {name: {inferred_type_name, default, help}}."""
    with _quiet():
        import papermill

        return papermill.inspect_notebook(str(path))


def parse_parameters(path: Path, pairs: list[str]) -> dict:
    """Typed values of `name=value` texts. Raises ValueError that lists the parameters with type and help."""
    declared, values = declared_parameters(path), {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise ValueError(f"parameter {pair!r} is not of the form name=value\n{_listing(path, declared)}")
        if name not in declared:
            raise ValueError(f"{path.stem} has no parameter {name!r}\n{_listing(path, declared)}")
        kind = declared[name]["inferred_type_name"].strip("'\" ")
        if name in values:
            raise ValueError(f"parameter {name} is given twice")
        try:
            values[name] = _typed(text, kind)
        except (ValueError, SyntaxError):
            raise ValueError(f"{name}={text!r} is not of type {kind}\n{_listing(path, declared)}") from None
    return values


def run_notebook(path: Path, parameters: dict, *, build: Path, figures: Path | None = None, progress=False) -> Result:
    """Execute a notebook in the current folder; the executed copy and its HTML go to `build`, also when a cell fails.

    figures: folder for the figures, the notebook's own choice if None.
    """
    build.mkdir(parents=True, exist_ok=True)
    output = build / path.name
    started = time.perf_counter()
    with _quiet(), tempfile.TemporaryDirectory() as folder:
        import papermill
        from nbclient.exceptions import CellTimeoutError, DeadKernelError

        log = Path(folder) / "figures.txt"
        env = {"MADMAX_FIGURE_LOG": str(log), **({"MADMAX_FIGURES": str(figures)} if figures else {})}
        env |= {name: os.environ.get(name, "1") for name in _THREADS}
        error = ""
        try:
            with _environment(env):
                papermill.execute_notebook(
                    str(path),
                    str(output),
                    parameters,
                    kernel_name="python3",
                    progress_bar=progress,
                    cwd=str(Path.cwd()),
                    extra_arguments=["--log-level=ERROR"],  # the kernel's own start-up remarks
                )
        except papermill.exceptions.PapermillExecutionError as failure:
            error = f"{failure.ename}: {failure.evalue}".strip().splitlines()[0]
        except (DeadKernelError, CellTimeoutError) as failure:  # the kernel was killed, for want of memory perhaps
            error = f"{type(failure).__name__}: {failure}".strip().splitlines()[0]
        seconds = time.perf_counter() - started
        written = log.read_text().splitlines() if log.exists() else []
        _write_html(output)
    return Result(path.stem, output, seconds, written, error)


def _typed(text: str, kind: str):
    if kind in ("str", "None", ""):
        return text
    if kind == "bool":
        if text.lower() not in ("true", "false"):
            raise ValueError
        return text.lower() == "true"
    value = ast.literal_eval(text)
    wanted = _TYPES.get(kind.split("[")[0])
    if wanted is float and type(value) is int:
        value = float(value)
    if wanted is not None and type(value) is not wanted:
        raise ValueError
    return value


def _listing(path: Path, declared: dict[str, dict]) -> str:
    lines = [f"parameters of {path.stem}:"]
    for name, about in declared.items():
        kind = about["inferred_type_name"].strip("'\" ")
        lines.append(f"  {name}: {kind} = {about['default']}  {about['help']}".rstrip())
    return "\n".join(lines)


def _write_html(output: Path) -> None:
    from madmax_lib.view.notebooks.site import notebook_page

    with replacing(output.with_suffix(".html")) as temporary:
        temporary.write_text(notebook_page(output), encoding="utf-8")


@contextmanager
def _environment(values: dict[str, str]):
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _quiet():
    """papermill and nbconvert warn about their own dependencies; none of it is the reader's business."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
