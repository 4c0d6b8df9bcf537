"""What does a pickle of others hold? Plain containers and values only, as it may name nothing to execute."""

import pickle
from pathlib import Path
from typing import Any

__all__ = ["load_plain"]


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str):
        raise ValueError(f"it names {module}.{name}, which a record of plain values does not")

    def persistent_load(self, key):
        raise ValueError("it refers to objects outside of the file")


def load_plain(path: Path) -> Any:
    """Content of a pickle of dictionaries, lists, texts and numbers, of any protocol.

    Raises ValueError with file and reason for anything else: globals, objects by reference, other bytes, a cut file.
    """
    try:
        with open(path, "rb") as file:
            return _Plain(file).load()
    except OSError:
        raise
    except Exception as reason:  # damaged bytes end in nearly any error
        raise ValueError(f"{path}: no record of plain values ({reason or type(reason).__name__})") from None
