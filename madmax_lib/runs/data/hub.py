"""Where do the real datasets come from? `datasets`, from its cache unless a download is
allowed.

Images come as (n, 3, image, image) float32 in -1..1 with labels, text as tokens and
targets. An image is decoded and resized once, then read from a file in the user's
cache. Without the package or the files, `read` raises FileNotFoundError or
ModuleNotFoundError with one line; `batches.get_data` then falls back.
"""

import os
import weakref
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np

from madmax_lib.catalog.datasets import cache_folder

__all__ = ["SOURCES", "read"]


@dataclass(frozen=True)
class _Source:
    """A real dataset."""

    path: str  # its name in Hugging Face's hub
    columns: tuple[str, ...]  # image and label, or text, or question and answer
    splits: tuple[
        str, ...
        # training and validation part; one name alone is cut, the last 2 % are for
        # validation
    ]
    classes: int = 0  # labels of images, 0 for text
    config: str | None = None  # variant of the dataset
    files: str | None = None  # one of its files, where all would be too many
    answers: tuple[str, ...] = ()  # texts of the labels, where these are numbers


SOURCES = {
    "cifar-100": _Source(
        "uoft-cs/cifar100", ("img", "fine_label"), ("train", "test"), 100
    ),
    "food-101": _Source(
        "ethz/food101", ("image", "label"), ("train", "validation"), 101
    ),
    "wikitext-103": _Source(
        "Salesforce/wikitext",
        ("text",),
        ("train", "validation"),
        config="wikitext-103-raw-v1",
    ),
    "metamathqa": _Source("meta-math/MetaMathQA", ("query", "response"), ("train",)),
    "glue": _Source(
        "nyu-mll/glue",
        ("sentence", "label"),
        ("train", "validation"),
        config="sst2",
        answers=("negative", "positive"),
    ),
    "c4": _Source(
        "allenai/c4", ("text",), ("train",), files="en/c4-train.00000-of-01024.json.gz"
    ),
}


class _Images:
    """Images of a table of `datasets`. what: its name for errors; image: pixels of a
    side.
    """

    def __init__(self, what: str, table, source: _Source, image: int):
        self.table = table
        self.picture = source.columns[0]
        self.image = image
        self.labels = _labels(what, table[source.columns[1]][:], source.classes)
        decoded = cache_folder() / "images" / f"{table._fingerprint}-{image}.rgb"
        decoded.parent.mkdir(parents=True, exist_ok=True)
        self.file = os.open(decoded, os.O_RDWR | os.O_CREAT, 0o644)
        weakref.finalize(self, os.close, self.file)

    def __len__(self) -> int:
        return len(self.labels)

    def __call__(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Images (n, 3, image, image) float32 in -1..1 and labels (n,) int64."""
        images = np.empty((len(indices), 3, self.image, self.image), dtype=np.float32)
        for image, index in zip(images, indices.tolist(), strict=True):
            pixels = np.frombuffer(self._record(index), dtype=np.uint8)[:-1].reshape(
                self.image, self.image, 3
            )
            image[:] = pixels.transpose(2, 0, 1) / np.float32(127.5) - 1
        return images, self.labels[indices]

    def _record(self, index: int) -> bytes:
        """Pixels of an image, then a byte that says they are there: the file has holes
        for images not seen yet.
        """
        size = 3 * self.image**2 + 1
        record = os.pread(self.file, size, index * size)
        if len(record) < size or not record[-1]:
            try:
                picture = (
                    self.table[index][self.picture]
                    .convert("RGB")
                    .resize((self.image, self.image))
                )
            except (
                OSError,
                ValueError,
                SyntaxError,
            ) as error:  # of a damaged file, each codec its own
                raise OSError(
                    f"image {index} of its dataset cannot be read ({error})"
                ) from None
            record = picture.tobytes() + b"\1"
            with suppress(OSError):  # a full disk is no reason to stop
                os.pwrite(self.file, record, index * size)
        return record


def read(name: str, allow_download: bool, image: int = 0) -> dict[str, _Images | list]:
    """Parts train and validation of a real dataset: `_Images`, or lists of texts or of
    (question, answer) pairs.

    Raises FileNotFoundError or ModuleNotFoundError, in one line, for what is not here.
    """
    if not find_spec("datasets"):
        raise ModuleNotFoundError(
            f"{name} needs the package datasets, which is not installed"
        )
    source = SOURCES[name]
    parts = dict(
        zip(
            ("train", "validation"),
            _from_hub(name, source, allow_download),
            strict=True,
        )
    )
    whats = {split: f"{split} data of {name}" for split in parts}
    if empty := [whats[split] for split, part in parts.items() if not len(part)]:
        raise ValueError(f"{empty[0]}: there are no samples")
    if source.classes:
        return {
            split: _Images(whats[split], part, source, image)
            for split, part in parts.items()
        }
    return {split: _texts(whats[split], part, source) for split, part in parts.items()}


def _from_hub(name: str, source: _Source, allow_download: bool) -> list:
    with _offline(not allow_download):
        import datasets

        try:
            parts = [
                datasets.load_dataset(
                    source.path, source.config, split=split, data_files=source.files
                )
                for split in source.splits
            ]
        except Exception as error:  # the package raises a dozen kinds of its own
            absent = (
                isinstance(error, (ConnectionError, FileNotFoundError))
                and not allow_download
            )
            what = (
                "is not on this machine and may not be downloaded"
                if absent
                else "could not be read"
            )
            reason = (str(error).strip().splitlines() or ["no reason given"])[0]
            raise FileNotFoundError(
                f"{name} {what} ({type(error).__name__}: {reason})"
            ) from None
    if len(parts) == 1:
        cut = parts[0].train_test_split(test_size=0.02, shuffle=False)
        parts = [cut["train"], cut["test"]]
    return parts


def _texts(what: str, part, source: _Source) -> list:
    columns = [part[column][:] for column in source.columns]
    if source.answers:
        columns[1] = [
            source.answers[label]
            for label in _labels(what, columns[1], len(source.answers))
        ]
    for name, column in zip(source.columns, columns, strict=True):
        if empty := [
            number for number, text in enumerate(column) if not isinstance(text, str)
        ]:
            raise ValueError(f"{what}: {name} of sample {empty[0]} is no text")
    return columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))


def _labels(what: str, labels: list, count: int) -> np.ndarray:
    """Labels (n,) int64. Raises ValueError for one that is no class, such as -1 of
    samples that have none.
    """
    values = np.array(labels, dtype=float)
    if len(wrong := np.flatnonzero(~((values >= 0) & (values < count)))):
        raise ValueError(
            f"{what}: label {labels[wrong[0]]} of sample {wrong[0]} is not in "
            f"0..{count - 1}"
        )
    return values.astype(np.int64)


@contextmanager
def _offline(offline: bool):
    """Hugging Face's libraries look into their caches only: they keep the switch in
    these two modules.
    """
    import datasets
    import huggingface_hub.constants as constants

    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = offline or before[1]
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before
