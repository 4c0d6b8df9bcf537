"""How does a room name its public calls without loading what is behind them?

The `__init__` of a room imports them under `TYPE_CHECKING`, as `from module import name as name`: editors and type
checkers follow these lines, and `open_room` reads them from the source, so that a name is loaded when it is first used.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType

__all__ = ["open_room"]


class _Room(ModuleType):
    """A package whose public calls stand before the modules inside it that have the same names."""

    def __getattr__(self, name: str):
        if name not in self._calls:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        module = self._calls[name]
        inside = import_module(f"{module}.{name}" if module == self.__name__ else module)
        value = inside if module == self.__name__ else getattr(inside, name)
        if module == f"{self.__name__}.{name}":  # `import room.name` shall find there what the module has
            value.__dict__.update({public: getattr(inside, public) for public in inside.__all__})
        self.__dict__[name] = value
        return value

    def __setattr__(self, name: str, value) -> None:
        hides_call = isinstance(value, ModuleType) and self._calls.get(name, self.__name__) != self.__name__
        if not hides_call:  # a loaded module becomes an attribute of its package
            super().__setattr__(name, value)

    def __dir__(self):
        return sorted({*self._calls, *(name for name in self.__dict__ if name.startswith("__"))})


def open_room(name: str) -> list[str]:
    """Turn the package `name` into a room, and give its public names: the value of its `__all__`."""
    room = sys.modules[name]
    with open(room.__file__, encoding="utf-8") as file:
        words = file.read().replace("(", " ").replace(")", " ").replace(",", " ").split()
    calls, module = {}, ""
    for before, word, after in zip(words, words[1:], words[2:], strict=False):
        if before == "from" and after == "import":
            module = word
        elif word == "as" and before == after:
            calls[before] = module
    room._calls = calls
    room.__class__ = _Room
    return list(calls)
