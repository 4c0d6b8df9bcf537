"""How does a room name its public calls without loading what is behind them?

The `__init__` of a room imports them under `TYPE_CHECKING`, as
`from module import name as name`, or `import *` where all that a module makes public is
a call of the room: editors and type checkers follow these lines, and `open_room` reads
them from the source, so that a name is loaded when it is first used.
"""

import re
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

__all__ = ["open_room"]


class _Room(ModuleType):
    """A package whose public calls stand before the modules inside it that have the
    same names.
    """

    def __getattr__(self, name: str):
        if name not in self._calls:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        module = self._calls[name]
        inside = import_module(
            f"{module}.{name}" if module == self.__name__ else module
        )
        value = inside if module == self.__name__ else getattr(inside, name)
        if (
            module == f"{self.__name__}.{name}"
        ):  # `import room.name` shall find there what the module has
            value.__dict__.update(
                {public: getattr(inside, public) for public in inside.__all__}
            )
        self.__dict__[name] = value
        return value

    def __setattr__(self, name: str, value) -> None:
        hides_call = (
            isinstance(value, ModuleType)
            and self._calls.get(name, self.__name__) != self.__name__
        )
        if not hides_call:  # a loaded module becomes an attribute of its package
            super().__setattr__(name, value)

    def __dir__(self):
        return sorted(
            {*self._calls, *(name for name in self.__dict__ if name.startswith("__"))}
        )


def open_room(name: str) -> list[str]:
    """Turn the package `name` into a room, and give its public names: the value of its
    `__all__`.
    """
    room = sys.modules[name]
    words = re.sub("[(),]", " ", Path(room.__file__).read_text()).split()
    calls = {}
    module = ""
    there = True
    for before, word, after in zip(words, words[1:], words[2:], strict=False):
        if before == "from" and after == "import":
            module = word
            there = (
                word == name
                or not word.startswith(f"{name}.")
                or _path_of(room, word).exists()
            )
        elif not there:  # a wing that was taken off
            continue
        elif word == "as" and before == after:
            calls[before] = module
        elif word == "*":
            calls |= dict.fromkeys(_public_names(room, module), module)
    room._calls = calls
    room.__class__ = _Room
    return list(calls)


def _path_of(room: ModuleType, module: str) -> Path:
    """The source of a module inside a room, which need not be there."""
    return Path(room.__file__).parent / (
        module.removeprefix(f"{room.__name__}.").replace(".", "/") + ".py"
    )


def _public_names(room: ModuleType, module: str) -> list[str]:
    """The `__all__` of a module inside a room, read from its source."""
    lists = re.findall(
        r"^__all__ \+?= \[(.*?)\]",
        _path_of(room, module).read_text(),
        re.MULTILINE | re.DOTALL,
    )
    return re.findall(r'"(\w+)"', "".join(lists))
