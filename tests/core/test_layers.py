"""The laws of the house, checked on the source: direction of imports, faces of rooms,
weight and air, words, names with a user.
"""

import ast
import collections
import functools
import io
import json
import re
import subprocess
import sys
import tokenize
from importlib import import_module
from pathlib import Path

import pytest

import madmax_lib
from madmax_lib.catalog.datasets import PROJECT

PACKAGE = Path(madmax_lib.__file__).parent
LAYERS = [
    {"base"},
    {"catalog", "timeline"},
    {"plan", "kinds", "specs"},  # the last two are public paths of the floor below
    {"plan_flags", "simulator", "traces", "runs"},
    {"calibration", "planner"},
    {"view"},
    {"papers"},
    {"__main__"},
]
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
WINGS = [  # folders and files that can be taken off, as CONTRIBUTING lists them
    "plan_flags",
    "traces/forensics",
    "traces/nsys.py",
    "runs/parallel/deepspeed.py",
    "simulator/offload",
    "calibration/job",
    "calibration/kernels",
    "calibration/verdict",
    "planner/hetero",
    "planner/tuner",
    "planner/tune.py",
    "planner/money",
    "planner/changes.py",
    "planner/beats.py",
    "view/explore",
    "view/report",
]
ONLY_IN = {
    "torch": ["runs/"],
    "hta": ["traces/hta.py"],
    "matplotlib": ["view/", "__main__.py", "plots.py"],  # of papers, each its own
    "seaborn": ["view/", "plots.py"],
    "ipywidgets": ["view/explore/"],
    "anywidget": ["view/explore/"],
    "papermill": ["view/"],
    "IPython": ["view/"],
    "dask": ["traces/", "planner/"],
    "distributed": ["traces/", "planner/"],
}
HEAVY = ["torch", "hta", "matplotlib", "dask", "ipywidgets", "pandas", "pyarrow"]
# Tokens of Python without comments and docstrings, wings left out: what a room may
# weigh. They are aims, not what came in: what does not fit makes room or stays out.
TOKENS = {
    "base": 3_350,
    "catalog": 11_700,
    "timeline": 6_000,
    "plan": 9_200,
    "simulator": 44_500,
    "traces": 63_450,
    "runs": 37_500,
    "calibration": 24_000,
    "planner": 10_000,
    "view": 34_000,
}
LIBRARY, CORE = 400_000, 245_000  # with papers and wings; without both
PER_LINE, PER_LINE_OF_MODULE = 10.0, 12.0  # tokens of a code line
COMMENTS = 75  # comments, alone or trailing, of 1,000 code lines
PAIRS = 250  # assignments of two names
TEST_LINES, MOST_PARAMETERS, SHORT = 17_000, 6, 9
MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
FACES = [
    name
    for name in MODULES
    if name.endswith("__init__.py") and "open_room" in (PACKAGE / name).read_text()
]
# first words of a docstring that name nothing
VAGUE = {"of", "that", "those", "as", "with", "what", "whose", "which", "how", "where"}
# words that say nothing alone: participles, prepositions, and "place" for an index
BARE = {
    *("own", "held", "told", "beside", "place", "whole", "known", "given", "found"),
    *("kept", "made", "shown", "said", "taken", "behind", "farther", "further"),
    *("alike", "apart", "existing", "has"),
}
TRICK = re.compile(
    r"\[\.\.\., None\]|\[:, None\]|\breshape\(|return_inverse|\.view\(np"
)
# What does not obey a law yet: lines of (test, subject). The list only gets shorter.
OWED = {
    tuple(line.split())
    for line in Path(__file__).with_name("owed.txt").read_text().splitlines()
}
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


@pytest.fixture
def owes(request):
    """Judge of a law: what is broken fails, but where it is owed; and what is owed no
    longer has to leave the list.
    """

    def judge(subject, broken):
        owed = (request.node.originalname, str(subject)) in OWED
        if owed and broken:
            pytest.xfail(str(broken))
        assert not owed, f"{subject} obeys: take it out of owed.txt"
        assert not broken, broken

    return judge


@functools.cache
def tree_of(path):
    return ast.parse((PACKAGE / path).read_text())


def imported(path, *, late=True):
    """Dotted names a module imports, except for type checking; late: in functions too."""
    tree = tree_of(path)
    unseen = {
        id(node)
        for branch in ast.walk(tree)
        if (
            (isinstance(branch, ast.If) and ast.unparse(branch.test) == "TYPE_CHECKING")
            or (
                not late and isinstance(branch, (ast.FunctionDef, ast.AsyncFunctionDef))
            )
        )
        for node in ast.walk(branch)
    }
    for node in ast.walk(tree):
        if id(node) in unseen:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                below = f"{node.module}.{alias.name}"
                yield below if dotted_path(below) else node.module


def dotted_path(name):
    """The module of ours that a dotted name is, as a path; empty if it is none."""
    stem = name.removeprefix("madmax_lib").replace(".", "/").removeprefix("/")
    paths = (f"{stem}.py", f"{stem}/__init__.py".removeprefix("/"))
    return next((path for path in paths if path in MODULES), "")


def own_imports(path, *, late=True):
    names = imported(path, late=late)
    ours = {dotted_path(name) for name in names if name.split(".")[0] == "madmax_lib"}
    return ours - {path}


def room_of(path):
    return path.split("/")[0].removesuffix(".py")


def is_wing(path):
    return any(path == wing or path.startswith(f"{wing}/") for wing in WINGS)


@pytest.mark.parametrize("path", [m for m in MODULES if m != "__init__.py"])
def test_imports_point_down(path):
    """Rooms of a floor do not know each other; nor papers; the core knows no wing."""
    own = room_of(path)
    assert own in LEVEL, f"{own} has no place in the layers"
    for other in own_imports(path):
        there = room_of(other)
        if other != "__init__.py" and there != own:
            assert LEVEL[there] < LEVEL[own], f"{path} imports {other}"
        if own == there == "papers" and other != "papers/__init__.py":
            papers = [name.split("/")[1] for name in (path, other)]
            shared = papers[1].endswith(".py")
            assert papers[0] == papers[1] or shared, f"{path} imports {other}"
    if not is_wing(path) and own != "papers":
        for other in own_imports(path, late=False):
            assert not is_wing(other), f"{path} imports the wing {other}"


def circles(graph):
    """Nodes that reach themselves."""
    reach = {node: set(nexts) for node, nexts in graph.items()}
    for middle in graph:
        for node in graph:
            if middle in reach[node]:
                reach[node] |= reach[middle]
    return [node for node in graph if node in reach[node]]


def test_no_circles():
    """Neither of modules nor of sub-rooms; a room's other modules count one by one."""
    modules = {path: own_imports(path) for path in MODULES}
    assert not circles(modules)
    corner = {
        path: "/".join(path.split("/")[:2]) if path.count("/") > 1 else path
        for path in MODULES
    }
    rooms = {name: set() for name in corner.values()}
    for path, others in modules.items():
        rooms[corner[path]] |= {corner[other] for other in others} - {corner[path]}
    assert not circles(rooms)


@pytest.mark.parametrize("path", MODULES)
def test_heavy_libraries_stay_in_their_rooms(path):
    for name in imported(path):
        allowed = ONLY_IN.get(name.split(".")[0])
        inside = allowed is None or any(
            path.startswith(place) or path.endswith(place) for place in allowed
        )
        assert inside, f"{path} imports {name}"


def test_importing_the_package_is_light():
    code = (
        "import madmax_lib, sys, json; "
        f"print(json.dumps([m for m in {HEAVY} if m in sys.modules]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert json.loads(run.stdout) == []


@pytest.mark.parametrize("path", FACES)
def test_rooms_name_their_calls(path):
    """Every name of a face is there, stands before a module of the same name, and is
    listed for completion.
    """
    name = ".".join(["madmax_lib", *path.split("/")[:-1]])
    code = f"""
import importlib, pkgutil, types
room = importlib.import_module({name!r})
for module in pkgutil.iter_modules(room.__path__):
    if module.name not in ("hta", "__main__"):
        importlib.import_module(room.__name__ + "." + module.name)
inside = {{call for call, module in room._calls.items() if module == room.__name__}}
assert room.__all__ and set(room.__all__) <= set(dir(room))
for call in room.__all__:
    is_module = isinstance(getattr(room, call), types.ModuleType)
    assert call == "hta" or is_module == (call in inside), call
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        sys.modules.setdefault(name, __import__(name, fromlist=["x"])).nothing  # noqa: B018


def test_notebooks_and_benchmarks_import_from_rooms():
    rooms = {
        "madmax_lib" + "".join(f".{part}" for part in path.split("/")[:-1])
        for path in FACES
    }
    for path in [
        *(PROJECT / "notebooks").glob("*.ipynb"),
        *(PROJECT / "benchmarks").glob("*.py"),
    ]:
        for name in re.findall(r"(?:from|import) (madmax_lib[.\w]*)", path.read_text()):
            assert name in rooms, f"{path.name} imports {name}"


@pytest.mark.parametrize("path", [m for m in MODULES if m != "__main__.py"])
def test_modules_and_what_is_public_in_them_have_docstrings(path):
    tree = tree_of(path)
    assert ast.get_docstring(tree), f"{path} has no docstring"
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            said = node.name.startswith("_") or ast.get_docstring(node)
            assert said, f"{path}: {node.name} has no docstring"


@functools.cache
def weight_of(path):
    """Tokens, code lines and comments of a module; docstrings are none of them."""
    tree = tree_of(path)
    documented = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and node.body:
            first = node.body[0]
            if ast.get_docstring(node, clean=False) is not None:
                documented |= set(range(first.lineno, first.end_lineno + 1))
    tokens, comments, code = 0, 0, set()
    text = (PACKAGE / path).read_text()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments += 1
        elif token.type not in NOT_CODE and token.start[0] not in documented:
            tokens += 1
            code |= set(range(token.start[0], token.end[0] + 1))
    return collections.Counter(tokens=tokens, comments=comments, code=len(code))


def weight(paths):
    return sum((weight_of(path) for path in paths), collections.Counter())


@pytest.mark.parametrize("room", TOKENS)
def test_a_room_weighs_what_it_may(room, owes):
    inside = [path for path in MODULES if room_of(path) == room]
    tokens = weight(path for path in inside if not is_wing(path))["tokens"]
    owes(room, f"{tokens:,} tokens" if tokens > TOKENS[room] else "")


@pytest.mark.parametrize(("part", "most"), [("core", CORE), ("library", LIBRARY)])
def test_the_library_weighs_what_it_may(part, most, owes):
    core = [m for m in MODULES if not is_wing(m) and room_of(m) != "papers"]
    tokens = weight(core if part == "core" else MODULES)["tokens"]
    owes(part, f"{tokens:,} tokens" if tokens > most else "")


@pytest.mark.parametrize("room", [*TOKENS, "plan_flags", "papers"])
def test_a_line_of_a_room_is_short(room):
    paths = [path for path in MODULES if room_of(path) == room]
    inside = weight(paths)
    assert inside["tokens"] <= PER_LINE * inside["code"]


@pytest.mark.parametrize("path", MODULES)
def test_a_line_of_a_module_is_short(path, owes):
    one = weight_of(path)
    is_dense = one["code"] >= 30 and one["tokens"] > PER_LINE_OF_MODULE * one["code"]
    owes(path, f"{one['tokens'] / max(one['code'], 1):.1f} a line" if is_dense else "")


@pytest.mark.parametrize("room", [*TOKENS, "plan_flags", "papers"])
def test_comments_say_why(room, owes):
    """Comments that give the reason or the equation, in 1,000 code lines."""
    inside = weight(path for path in MODULES if room_of(path) == room)
    count = 1000 * inside["comments"] / inside["code"]
    owes(room, f"{count:.0f} comments of 1,000" if count < COMMENTS else "")


def functions_of(path):
    return [
        node
        for node in ast.walk(tree_of(path))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]


def test_a_line_assigns_one_name_or_a_pair(owes):
    pairs = 0
    wide = []
    for path in MODULES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
                names = [t for t in node.targets if isinstance(t, ast.Tuple)]
                count = len(node.value.elts) if names else 0
                wide += [f"{path}:{node.lineno}"] if count > 2 else []
                pairs += count == 2
    owes("library", wide if pairs <= PAIRS else f"{pairs} pairs")


@functools.cache
def calls_of_faces():
    rooms = [face.rpartition("/")[0].replace("/", ".") for face in FACES]
    modules = [import_module(f"madmax_lib.{room}".rstrip(".")) for room in rooms]
    return {call for module in modules for call in module.__all__}


@pytest.mark.parametrize("path", MODULES)
def test_six_parameters_at_most_and_three_results_have_names(path, owes):
    """But for the calls of faces; three things returned are a dataclass."""
    broken = []
    for node in functions_of(path):
        arguments = node.args
        names = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        count = sum(name.arg not in ("self", "cls") for name in names)
        public = node.name in calls_of_faces()
        if count > MOST_PARAMETERS and not public:
            broken.append(f"{node.name} has {count} parameters")
        for inner in ast.walk(node):
            value = inner.value if isinstance(inner, ast.Return) else None
            if isinstance(value, ast.Tuple) and len(value.elts) > 2:
                broken.append(f"{node.name} returns a bare tuple")
    owes(path, broken)


@pytest.mark.parametrize("path", MODULES)
def test_a_docstring_begins_with_its_noun_or_verb(path, owes):
    broken = []
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for node in ast.walk(tree_of(path)):
        text = isinstance(node, kinds) and ast.get_docstring(node)
        first = re.match(r"\W*([\w-]+)", text)[1].lower() if text else ""
        if first in VAGUE:
            broken.append(f"{node.name} begins with {first!r}")
    owes(path, broken)


def names_given(tree):
    """Names that a module gives: of functions, arguments, fields and variables."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


@pytest.mark.parametrize("path", MODULES)
def test_a_name_says_something_alone(path, owes):
    names = {name.lstrip("_") for name in names_given(tree_of(path))}
    owes(path, sorted(BARE & names))


@pytest.mark.parametrize("path", MODULES)
def test_a_numpy_trick_has_its_reason_above(path, owes):
    broken = []
    lines = (PACKAGE / path).read_text().splitlines()
    for number, line in enumerate(lines):
        if TRICK.search(line.split("#")[0]):
            near = lines[max(number - 4, 0) : number + 1]
            said = any("#" in text or '"""' in text for text in near)
            broken += [] if said else [f"{number + 1}: {line.strip()}"]
    owes(path, broken)


@functools.cache
def references():
    """How often each private name is named in the library, its definition included."""
    text = "\n".join((PACKAGE / path).read_text() for path in MODULES)
    return collections.Counter(re.findall(r"\b_[a-z]\w*", text))


@pytest.mark.parametrize("path", MODULES)
def test_a_short_function_named_once_stands_where_it_is_used(path, owes):
    broken = []
    for node in tree_of(path).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("_"):
            lines = node.end_lineno - node.lineno + 1
            lonely = references()[node.name] == 2 and not node.decorator_list
            broken += [node.name] if lonely and lines < SHORT else []
    owes(path, broken)


def test_tests_stay_readable(owes):
    lines = sum(
        path.read_text().count("\n") for path in (PROJECT / "tests").rglob("*.py")
    )
    owes("tests", f"{lines:,} lines" if lines > TEST_LINES else "")


def test_a_class_name_has_one_meaning():
    places = {}
    for path in MODULES:
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(path)
    assert not {name: paths for name, paths in places.items() if len(paths) > 1}


def words_of(path):
    """Identifiers of a file; of a notebook those in its cells."""
    text = path.read_text()
    if path.suffix == ".ipynb":
        text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    return set(re.findall(r"\w+", text))


def public_names(tree):
    """What a module defines without an underscore, `main` of a script aside."""
    for node in tree.body:
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        names = [getattr(node, "name", None)]
        names += [target.id for target in targets if isinstance(target, ast.Name)]
        yield from (name for name in names if name and not name.startswith("_"))


def test_public_names_have_users():
    """A public function or constant is a call of a room or used by another module, a
    notebook, a benchmark or docs.

    Classes may be public for what functions return, exceptions for what they raise.
    """
    users = [
        *PACKAGE.rglob("*.py"),
        PROJECT / "README.md",
        PROJECT / "CONTRIBUTING.md",
        *PROJECT.glob("docs/*.*"),
    ]
    users += [
        path
        for folder in ("notebooks", "benchmarks", "traces")
        for path in (PROJECT / folder).rglob("*.*")
        if path.suffix in (".py", ".ipynb")
    ]
    words = {path: words_of(path) for path in users if path.name != "__init__.py"}
    lonely = []
    for path in MODULES:
        text = (PACKAGE / path).read_text()
        if '__name__ == "__main__"' in text:  # a script uses its own
            continue
        tree = tree_of(path)
        classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
        for name in public_names(tree):
            others = [
                user
                for user, found in words.items()
                if user != PACKAGE / path and name in found
            ]
            calls = calls_of_faces() | {"open_room"}
            if not others and name not in classes and name not in calls:
                lonely.append(f"{path}: {name}")
    assert not lonely, "\n".join(lonely)
