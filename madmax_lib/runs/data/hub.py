"""Where do the real datasets come from? `datasets`, from its cache unless a download is allowed.

Images come as (n, 3, image, image) float32 in -1..1 with labels, text as tokens and targets. Without the package or
the files, `read` raises FileNotFoundError or ModuleNotFoundError with one line; `batches.get_data` then falls back.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from operator import itemgetter

import numpy as np

__all__ = ["SOURCES", "read"]


@dataclass(frozen=True)
class _Source:
    """A real dataset.

    path: its name in Hugging Face's hub.
    columns: image and label, or text, or question and answer.
    splits: names of the training and validation part; one name alone is cut, the last 2 % are for validation.
    classes: labels of images, 0 for text (0).
    config: variant of the dataset (None).
    files: one of its files, where all would be too many (None).
    answers: texts of the labels, where these are numbers (()).
    """

    path: str
    columns: tuple[str, ...]
    splits: tuple[str, ...]
    classes: int = 0
    config: str | None = None
    files: str | None = None
    answers: tuple[str, ...] = ()


SOURCES = {
    "cifar-100": _Source("uoft-cs/cifar100", ("img", "fine_label"), ("train", "test"), 100),
    "food-101": _Source("ethz/food101", ("image", "label"), ("train", "validation"), 101),
    "wikitext-103": _Source("Salesforce/wikitext", ("text",), ("train", "validation"), config="wikitext-103-raw-v1"),
    "metamathqa": _Source("meta-math/MetaMathQA", ("query", "response"), ("train",)),
    "glue": _Source(
        "nyu-mll/glue", ("sentence", "label"), ("train", "validation"), config="sst2", answers=("negative", "positive")
    ),
    "c4": _Source("allenai/c4", ("text",), ("train",), files="en/c4-train.00000-of-01024.json.gz"),
}


@dataclass(frozen=True)
class _Images:
    """Images of a table, decoded when they are asked for. columns: picture and label; image: pixels of a side."""

    table: Sequence
    columns: tuple[str, ...]
    image: int

    def __len__(self) -> int:
        return len(self.table)

    def __call__(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Images (n, 3, image, image) float32 in -1..1 and labels (n,) int64."""
        pictures, labels = zip(*(itemgetter(*self.columns)(self.table[int(index)]) for index in indices), strict=True)
        return np.stack([_pixels(picture, self.image) for picture in pictures]), np.array(labels, dtype=np.int64)


def read(name: str, allow_download: bool, image: int) -> tuple[list, list] | tuple[_Images, _Images]:
    """Training and validation part of a real dataset: `_Images`, or lists of texts or of (question, answer) pairs.

    Raises FileNotFoundError or ModuleNotFoundError, in one line, for what is not here.
    """
    if not find_spec("datasets"):
        raise ModuleNotFoundError(f"{name} needs the package datasets, which is not installed")
    source = SOURCES[name]
    parts = _from_hub(name, source, allow_download)
    if source.classes:
        return tuple(_Images(part, source.columns, image) for part in parts)
    return tuple(_texts(part, source) for part in parts)


def _from_hub(name: str, source: _Source, allow_download: bool) -> list:
    with _offline(not allow_download):
        import datasets

        try:
            parts = [
                datasets.load_dataset(source.path, source.config, split=split, data_files=source.files)
                for split in source.splits
            ]
        except Exception as error:  # the package raises a dozen kinds of its own for what is not in its cache
            raise _missing(name, allow_download, error) from None
    if len(parts) == 1:
        cut = parts[0].train_test_split(test_size=0.02, shuffle=False)
        parts = [cut["train"], cut["test"]]
    return parts


def _texts(part, source: _Source) -> list:
    columns = [part[column] for column in source.columns]
    if len(columns) == 1:
        return columns[0]
    if source.answers:
        columns[1] = [source.answers[label] for label in columns[1]]
    return list(zip(*columns, strict=True))


def _pixels(picture, image: int) -> np.ndarray:
    """A PIL image as (3, image, image) float32 in -1..1."""
    small = picture.convert("RGB").resize((image, image))
    return np.asarray(small, dtype=np.float32).transpose(2, 0, 1) / 127.5 - 1


def _missing(name: str, allow_download: bool, error: Exception) -> FileNotFoundError:
    absent = isinstance(error, (ConnectionError, FileNotFoundError)) and not allow_download
    what = "is not on this machine and may not be downloaded" if absent else "could not be read"
    reason = (str(error).strip().splitlines() or ["no reason given"])[0]
    return FileNotFoundError(f"{name} {what} ({type(error).__name__}: {reason})")


@contextmanager
def _offline(offline: bool):
    """Hugging Face's libraries look into their caches only: they keep the switch in these two modules."""
    import datasets
    import huggingface_hub.constants as constants

    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = offline or before[1]
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before
