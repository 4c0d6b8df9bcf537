"""Which batch does step k see? Data by name, offline by default; each rank draws its
own share of the global batch.

The samples of a batch follow from (seed, step) alone, whatever the layout: epoch after
epoch of shuffled ones, cut into batches without remainder, so no batch is short. A
dataset that is not on this machine is replaced by generated data of the same kind, with
a DataWarning; who asked finds the reason in `note`. Batches of coming steps are drawn
by threads: generating, decoding and pinning release Python's lock.
"""

import difflib
import re
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import numpy as np

from madmax_lib.runs.data import hub
from madmax_lib.runs.data.synthetic import SyntheticImages, arithmetic_problem
from madmax_lib.runs.data.text import cached_tokens, chat, example, tokenizer, windows

__all__ = [
    "NAMES",
    "Data",
    "DataWarning",
    "canonical",
    "default_name",
    "draw_ahead",
    "get_data",
    "kind_of",
]

_GENERATED = 50_000  # samples of a generated dataset, as many as CIFAR-100 has
_VALIDATION = 2_000
_MOST = 50_000  # samples of a real text that are tokenized
_PROBLEM_BYTES = 96  # of an arithmetic problem in the chat format, at most
_IMAGES = (
    "synthetic-images",
    *(name for name, source in hub.SOURCES.items() if source.classes),
)
NAMES = (
    *_IMAGES,
    "arithmetic",
    *(name for name, source in hub.SOURCES.items() if not source.classes),
)

Read = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


class DataWarning(UserWarning):
    """Another dataset than the one asked for is used."""


@dataclass(frozen=True)
class Data:
    """A dataset: its samples by split and number, and batches of them."""

    name: str  # of the dataset that is used
    kind: str  # images or text
    sizes: dict[str, int]  # samples of train and validation
    # by split, samples (n,) to inputs and targets: images (n, 3, H, W) and labels (n,),
    # or both tokens (n, S)
    read: dict[str, Read]
    classes: int = 0  # labels of images
    vocab: int = 0  # tokens of the tokenizer
    note: str = ""  # why it is not the dataset asked for, else empty

    def batch(
        self,
        step: int,
        size: int,
        seed: int = 0,
        split: str = "train",
        share: tuple[int, int] = (0, 1),
    ) -> dict[str, np.ndarray]:
        """A share (number, of how many) of the batch of a step: {"images", "labels"} or
        {"tokens", "targets"}.

        Raises ValueError if the shares are not equal.
        """
        number, count = share
        if size % count:
            raise ValueError(f"dp={count} does not divide a batch of {size} samples")
        chosen = self.indices(step, size, seed, split).reshape(count, -1)[number]
        inputs, targets = self.read[split](chosen)
        if self.kind == "images":
            return {"images": inputs, "labels": targets}
        return {"tokens": inputs.astype(np.int64), "targets": targets.astype(np.int64)}

    def indices(
        self, step: int, size: int, seed: int = 0, split: str = "train"
    ) -> np.ndarray:
        """Samples (size,) of a step: numbers step x size and on of a sequence of
        shuffled epochs.
        """
        count = self.sizes[split]
        numbers = np.arange(step * size, (step + 1) * size)
        epochs = {
            epoch: np.random.default_rng([seed, epoch, 3]).permutation(count)
            for epoch in set(numbers // count)
        }
        return np.array(
            [epochs[number // count][number % count] for number in numbers.tolist()]
        )


def draw_ahead(
    draw: Callable[[int], dict], steps: Iterable[int], threads: int
) -> Iterator[dict]:
    """draw(step) of each step in order; each of the threads is a batch ahead."""
    coming = deque()
    with ThreadPoolExecutor(threads) as pool:
        for step in steps:
            coming.append(pool.submit(draw, step))
            if len(coming) > threads:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()


def default_name(kind: str) -> str:
    """Data that is always at hand: synthetic-images for images, arithmetic for text."""
    return "synthetic-images" if kind == "images" else "arithmetic"


def kind_of(name: str) -> str:
    """images or text, of a dataset's canonical name."""
    return "images" if name in _IMAGES else "text"


def canonical(name: str) -> str:
    """The spelling of a dataset's name: CIFAR100 and cifar_100 are cifar-100. Raises
    ValueError with the nearest.
    """
    names = {re.sub(r"[^a-z0-9]", "", name): name for name in NAMES}
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    if plain in names:
        return names[plain]
    near = difflib.get_close_matches(name.lower(), NAMES, n=3, cutoff=0.0)
    raise ValueError(f"unknown data {name!r}; nearest: {', '.join(near)}")


def get_data(
    name: str,
    allow_download: bool = False,
    *,
    image: int = 32,
    classes: int = 10,
    sequence: int = 128,
    by: str = "bytes",
    seed: int = 0,
) -> Data:
    """The dataset of a name, without a download unless `allow_download`.

    image: pixels of a side. classes: of generated images. sequence: tokens per sample.
    by: the tokenizer, bytes or one of Hugging Face by name or folder. seed: of
    generated data. What is not on this machine is replaced by generated data of its
    kind, with a DataWarning. Raises ValueError for an unknown name.
    """
    name = canonical(name)
    kind = kind_of(name)

    def generated(by: str) -> Data:
        if kind == "images":
            return _endless(
                "synthetic-images",
                kind,
                SyntheticImages(image, classes, seed),
                classes=classes,
            )
        tokens = tokenizer(by, allow_download)
        return _endless(
            "arithmetic",
            kind,
            partial(_problems, tokens, sequence, seed),
            vocab=tokens.vocab,
        )

    if name == default_name(kind):
        return generated(by)
    try:
        if kind == "images":
            parts = hub.read(name, allow_download, image)
            sizes = {split: len(part) for split, part in parts.items()}
            return Data(name, kind, sizes, parts, classes=hub.SOURCES[name].classes)
        return _real_text(name, allow_download, sequence, by)
    except (ModuleNotFoundError, FileNotFoundError) as reason:
        note = f"{default_name(kind)} in place of {name}: {reason}"
        warnings.warn(note, DataWarning, stacklevel=2)
        return replace(generated("bytes"), note=note)


def _endless(name: str, kind: str, read: Read, **more) -> Data:
    """Generated data: samples of validation are those after the ones to train on."""
    parts = {
        "train": read,
        "validation": lambda indices: read(np.asarray(indices) + _GENERATED),
    }
    return Data(
        name, kind, {"train": _GENERATED, "validation": _VALIDATION}, parts, **more
    )


def _problems(
    tokens, sequence: int, seed: int, indices: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """As many arithmetic problems per sample as surely fit."""
    many = max(sequence // _PROBLEM_BYTES, 1)
    rows = []
    for index in np.asarray(indices).tolist():
        problems = [
            arithmetic_problem(many * index + part, seed) for part in range(many)
        ]
        rows.append(
            example(
                [tokens.chat(*problem) for problem in problems], sequence, tokens.pad
            )
        )
    return tuple(np.stack(part) for part in zip(*rows, strict=True))


def _real_text(name: str, allow_download: bool, sequence: int, by: str) -> Data:
    tokens = tokenizer(by, allow_download)
    sizes = {}
    read = {}
    for split, texts in hub.read(name, allow_download).items():
        make = windows if isinstance(texts[0], str) else chat
        key = chain(
            [name, split, tokens.name, str(sequence)],
            texts if make is windows else chain.from_iterable(texts),
        )
        parts = cached_tokens(key, partial(make, texts, tokens, sequence, _MOST))
        sizes[split] = len(parts[0])
        read[split] = lambda indices, parts=parts: tuple(
            part[indices] for part in parts
        )
    return Data(name, "text", sizes, read, vocab=tokens.vocab)
