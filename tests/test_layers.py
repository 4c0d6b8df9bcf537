"""The direction of imports, checked on the source; importing the package loads nothing heavy."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import madmax_lib

PACKAGE = Path(madmax_lib.__file__).parent
LAYERS = [
    {"units", "intervals", "atomic", "details"},
    {"specs", "plan", "plan_flags", "plan_layers", "timeline"},
    {"kinds"},
    {"catalog", "profiles", "datasets", "accounting"},
    {"simulator", "traces", "runs"},
    {"papers", "calibration", "planner"},
    {"view"},
    {"__main__"},
]
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
FREE_SIBLINGS = {
    "units",
    "intervals",
    "atomic",
    "details",
    "specs",
    "plan",
    "plan_flags",
    "plan_layers",
    "timeline",
    "catalog",
    "profiles",
    "datasets",
    "accounting",
}
ONLY_IN = {
    "torch": {"runs/"},
    "hta": {"traces/hta.py"},
    "matplotlib": {"view/", "__main__.py"},
    "seaborn": {"view/"},
    "ipywidgets": {"view/"},
    "papermill": {"view/"},
    "IPython": {"view/"},
    "anywidget": {"view/"},
    "dask": {"traces/", "planner/"},
    "distributed": {"traces/", "planner/"},
}
HEAVY = ["torch", "hta", "matplotlib", "dask", "ipywidgets", "pandas", "pyarrow"]
MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
GUIDE = {"core": 1300, "simulator": 1800, "traces": 2000, "papers": 1200, "calibration": 500, "planner": 900,
         "profiles": 300, "runs": 1400, "view": 800}  # fmt: skip


def imported(path):
    """Dotted names a module imports anywhere, except for type checking."""
    tree = ast.parse((PACKAGE / path).read_text())
    typing_only = {id(n) for t in ast.walk(tree) if isinstance(t, ast.If) and ast.unparse(t.test) == "TYPE_CHECKING"
                   for n in ast.walk(t)}  # fmt: skip
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module


def room(dotted):
    parts = dotted.split(".")
    return parts[1] if len(parts) > 1 else None


@pytest.mark.parametrize("path", [m for m in MODULES if m != "__init__.py"])
def test_imports_point_down(path):
    own = path.split("/")[0].removesuffix(".py")
    assert own in LEVEL, f"{own} has no place in the layers"
    for name in imported(path):
        if not name.startswith("madmax_lib") or room(name) in (None, own):
            continue
        other = room(name)
        same = LEVEL[other] == LEVEL[own] and {own, other} <= FREE_SIBLINGS
        assert LEVEL[other] < LEVEL[own] or same, f"{path} imports {name}"


@pytest.mark.parametrize("path", MODULES)
def test_heavy_libraries_stay_in_their_rooms(path):
    for name in imported(path):
        allowed = ONLY_IN.get(name.split(".")[0])
        assert allowed is None or any(path.startswith(place) for place in allowed), f"{path} imports {name}"


def test_importing_the_package_is_light():
    code = f"import madmax_lib, sys, json; print(json.dumps([m for m in {HEAVY} if m in sys.modules]))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(run.stdout) == []


def test_public_names():
    assert len(madmax_lib.__all__) <= 24
    modules = {path.stem for path in PACKAGE.glob("*.py")} | {p.name for p in PACKAGE.iterdir() if p.is_dir()}
    assert not modules & set(madmax_lib.__all__)
    assert all(getattr(madmax_lib, name) is not None for name in madmax_lib.__all__)
    assert set(madmax_lib.__all__) <= set(dir(madmax_lib))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        madmax_lib.nothing  # noqa: B018


@pytest.mark.parametrize("path", [m for m in MODULES if m != "__main__.py"])
def test_modules_say_what_they_answer_and_what_is_public(path):
    tree = ast.parse((PACKAGE / path).read_text())
    assert ast.get_docstring(tree), f"{path} has no docstring"
    public = {t.id for n in tree.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)}
    if path.rpartition("/")[2] != "__init__.py":
        assert "__all__" in public, f"{path} has no __all__"
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{path}: {node.name} has no docstring"


def test_size_is_printed(capsys):
    """A guide, not a rule: lines per room beside what the design allows."""
    lines = dict.fromkeys(GUIDE, 0)
    for path in MODULES:
        own = path.split("/")[0] if "/" in path else "core"
        lines[own] = lines.get(own, 0) + (PACKAGE / path).read_text().count("\n")
    with capsys.disabled():
        print("\nlines per room:", ", ".join(f"{name} {count}/{GUIDE[name]}" for name, count in lines.items() if count))
    assert sum(lines.values()) > 0
