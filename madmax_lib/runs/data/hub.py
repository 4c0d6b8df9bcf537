"""Real datasets, by `datasets` from its cache unless a download is allowed.

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

from madmax_lib import catalog
from madmax_lib.base import parse_fields
from madmax_lib.base.extras import with_extra
from madmax_lib.catalog.datasets import cache_folder

_CUT = 0.02  # share for validation of a dataset that has one split


@dataclass(frozen=True)
class _Source:
    """A real dataset, a row of data/run_datasets.csv."""

    path: str = ""  # its name in Hugging Face's hub
    # image and label, or text, or parts of the question and answer
    columns: tuple[str, ...] = ()
    splits: tuple[str, ...] = ()  # training and validation part; one name alone is cut
    classes: int = 0  # labels of images, 0 for text
    config: str = ""  # variant of the dataset, "" for its only one
    files: str = ""  # one of its files, where all would be too many
    answers: tuple[str, ...] = ()  # texts of the labels, where these are numbers


_ROWS = catalog.table("run_datasets").set_index("name")
SOURCES = {
    name: _Source(**parse_fields(_Source, row, name))
    for name, row in _ROWS.drop(columns=["source", "date"]).to_dict("index").items()
}
_BOTH = ("train", "validation")


class _Images:
    """Images of a table of `datasets`. noun: its name for errors; image: pixels of a
    side.
    """

    def __init__(self, noun, table, source, image):
        self.table = table
        self.column, label = source.columns
        self.image = image
        self.labels = _labels(noun, table[label][:], source.classes)
        decoded = cache_folder() / "images" / f"{table._fingerprint}-{image}.rgb"
        decoded.parent.mkdir(parents=True, exist_ok=True)
        self.file = os.open(decoded, os.O_RDWR | os.O_CREAT, 0o644)
        weakref.finalize(self, os.close, self.file)

    def __len__(self):
        return len(self.labels)

    def __call__(self, indices):
        """Images (n, 3, image, image) float32 in -1..1 and labels (n,) int64."""
        side = self.image
        images = np.empty((len(indices), 3, side, side), dtype=np.float32)
        for image, index in zip(images, indices.tolist(), strict=True):
            pixels = np.frombuffer(self._record(index), dtype=np.uint8)[:-1]
            # a picture is stored by row, column and colour; networks want colour first
            image[:] = pixels.reshape(side, side, 3).transpose(2, 0, 1)
        images /= np.float32(127.5)
        images -= 1
        return images, self.labels[indices]

    def _record(self, index):
        """Pixels of an image, then a byte that says they are there: the file has holes
        for images not seen yet.
        """
        size = 3 * self.image**2 + 1
        record = os.pread(self.file, size, index * size)
        if len(record) == size and record[-1]:
            return record
        try:
            picture = self.table[index][self.column].convert("RGB")
            record = picture.resize((self.image, self.image)).tobytes() + b"\1"
        except (OSError, ValueError, SyntaxError) as error:  # each codec has its own
            raise OSError(
                f"image {index} of its dataset cannot be read ({error})"
            ) from None
        with suppress(OSError):  # a full disk is no reason to stop
            os.pwrite(self.file, record, index * size)
        return record


def read(name: str, allow_download: bool, image: int = 0) -> dict[str, _Images | list]:
    """Parts train and validation of a real dataset: `_Images`, or lists of texts or of
    (question, answer) pairs.

    Raises FileNotFoundError or ModuleNotFoundError, in one line, for what is not here.
    """
    if not find_spec("datasets"):
        raise with_extra(ModuleNotFoundError(name="datasets"))
    source = SOURCES[name]
    parts = {}
    for split, table in zip(_BOTH, _tables(name, source, allow_download), strict=True):
        noun = f"{split} data of {name}"
        if not len(table):
            raise ValueError(f"{noun}: no samples")
        if source.classes:
            parts[split] = _Images(noun, table, source, image)
        else:
            parts[split] = _texts(noun, table, source)
    return parts


def _tables(name, source, allow_download):
    with _offline(not allow_download):
        import datasets

        load = datasets.load_dataset
        files = source.files or None
        try:
            tables = [
                load(source.path, source.config or None, split=split, data_files=files)
                for split in source.splits
            ]
        except Exception as error:  # the package raises a dozen kinds of its own
            absent = isinstance(error, (ConnectionError, FileNotFoundError))
            state = "could not be read"
            if absent and not allow_download:
                state = "is not on this machine and may not be downloaded"
            lines = str(error).strip().splitlines() or ["no reason given"]
            raise FileNotFoundError(
                f"{name} {state} ({type(error).__name__}: {lines[0]})"
            ) from None
    if len(tables) == 1:
        cut = tables[0].train_test_split(test_size=_CUT, shuffle=False)
        tables = [cut["train"], cut["test"]]
    return tables


def _texts(noun, table, source):
    columns = [table[column][:] for column in source.columns]
    if source.answers:
        labels = _labels(noun, columns[-1], len(source.answers))
        columns[-1] = [source.answers[label] for label in labels]
    for name, column in zip(source.columns, columns, strict=True):
        for number, text in enumerate(column):
            if not isinstance(text, str):
                raise ValueError(f"{noun}: {name} of sample {number} is no text")
    *asked, answers = columns
    if not asked:
        return answers
    # a question of two sentences, such as a premise and a hypothesis, has two lines
    questions = map("\n".join, zip(*asked, strict=True))
    return list(zip(questions, answers, strict=True))


def _labels(noun, labels, count):
    """Labels (n,) int64. Raises ValueError for one that is no class, such as -1 of
    samples that have none.
    """
    values = np.array(
        labels, dtype=float
    )  # a missing label is NaN, which is in no range
    wrong = np.flatnonzero(~((values >= 0) & (values < count)))
    if len(wrong):
        first = wrong[0]
        raise ValueError(
            f"{noun}: label {labels[first]} of sample {first} is not in 0..{count - 1}"
        )
    return values.astype(np.int64)


@contextmanager
def _offline(offline):
    """Hugging Face's libraries look into their caches only."""
    import datasets
    import huggingface_hub.constants as constants

    # both read the variable of the environment once and keep the switch in a module
    switches = (datasets.config, constants)
    earlier = [module.HF_HUB_OFFLINE for module in switches]
    for module in switches:
        module.HF_HUB_OFFLINE = offline or earlier[1]
    try:
        yield
    finally:
        for module, value in zip(switches, earlier, strict=True):
            module.HF_HUB_OFFLINE = value
