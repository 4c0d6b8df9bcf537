"""Doors of rooms: a package names its public calls without loading what is behind them.

The stub of a room, `__init__.pyi`, imports them as `from module import name as name`,
or `import *` where all that a module makes public is a call of the room: editors and
type checkers follow these lines, and `open_room` reads them, so that a name is loaded
when it is first used [as `lazy_loader.attach_stub`, scientific-python.org/specs/spec-0001].
"""

import ast
import contextlib
import gc
import re
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

from madmax_lib.base.extras import with_extra

# what a module defines without an underscore; to parse all modules would slow the import
# (a function or class, or a constant)
_PUBLIC = re.compile(r"^(?:def|class) ([A-Za-z]\w*)|^([A-Z]\w*)(?:: .+)? = ", re.M)


@contextlib.contextmanager
def uncollected():
    """Time without garbage collection: many small objects are made and none becomes
    garbage.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


class _Room(ModuleType):
    """A package whose public calls stand before the modules inside it that have the
    same names.
    """

    # `_calls`: the module that each call is in; the room itself for a module of it

    def __getattr__(self, name):
        if name not in self._calls:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        module = self._calls[name]
        is_inside = module == self.__name__
        try:
            # a sixth of what importing pandas takes
            with uncollected():
                value = import_module(f"{module}.{name}" if is_inside else module)
        except ModuleNotFoundError as error:
            raise with_extra(error) from None
        if not is_inside:
            source = value
            value = getattr(source, name)
            if module == f"{self.__name__}.{name}":
                # the call hides its module: `import room.name` then finds on the call
                # what the module has
                for each in filter(lambda each: each[0] != "_", vars(source)):
                    value.__dict__[each] = getattr(source, each)
        self.__dict__[name] = value  # the next use does not come here
        return value

    def __setattr__(self, name, value):
        # Python sets every module it loads as an attribute of its package; it must not
        # replace a call of the same name
        is_call = self._calls.get(name, self.__name__) != self.__name__
        if not (is_call and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self):
        dunders = [name for name in self.__dict__ if name.startswith("__")]
        return sorted({*self._calls, *dunders})


def open_room(name: str) -> list[str]:
    """Turn the package `name` into a room, and give its public names: the value of its
    `__all__`.
    """
    room = sys.modules[name]
    calls = {}
    stub = Path(room.__file__).with_suffix(".pyi")
    for node in ast.walk(ast.parse(stub.read_text())):
        if not isinstance(node, ast.ImportFrom):
            continue
        inside = node.module.startswith(f"{name}.")
        if inside and not _source_path(room, node.module).exists():
            continue  # a wing that was taken off
        for alias in node.names:
            if alias.name == "*":
                text = _source_path(room, node.module).read_text()
                for pair in _PUBLIC.findall(text):
                    calls["".join(pair)] = node.module
            elif alias.name == alias.asname:
                calls[alias.name] = node.module
    room._calls = calls
    room.__class__ = _Room
    return list(calls)


def _source_path(room, module):
    """Source file of a module inside a room, whether it is there or not."""
    inside = module.removeprefix(f"{room.__name__}.").replace(".", "/")
    return Path(room.__file__).parent / f"{inside}.py"
