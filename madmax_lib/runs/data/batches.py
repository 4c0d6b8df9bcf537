"""Batches of a step, of data by name, offline by default; each rank draws its own share
of the global batch.

The samples of a batch follow from (seed, step) alone, whatever the layout: epoch after
epoch of shuffled ones, cut into batches without remainder, so no batch is short. A
dataset that is not on this machine is replaced by generated data of the same kind, with
a DataWarning; who asked finds the reason in `note`. Batches of coming steps are drawn
by threads: generating, decoding and pinning release Python's lock. Generated are images
with a pattern per class, and arithmetic word problems; sample i is always the same for
a seed, whoever draws it, so that a loss curve can be tested.
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
from typing import NamedTuple

import numpy as np

from madmax_lib.runs.data import hub
from madmax_lib.runs.data.text import cached_tokens, example, tokenizer, windows

# cosines per class and colour: low frequencies, which patches of any size can see
_WAVES = 3
# The noise is a random signed byte, whose variance is (2^16 - 1) / 12, times this: a
# standard deviation of 0.6, beside patterns of about 1.
_NOISE = np.float32(0.6 / ((2**16 - 1) / 12) ** 0.5)
_NAMES = ("Ada", "Ben", "Cem", "Dia", "Eva", "Fei", "Gus", "Ina")
_THINGS = ("apples", "books", "coins", "eggs", "maps", "pens", "shells", "stamps")


_GENERATED = 50_000  # samples of a generated dataset, as many as CIFAR-100 has
_VALIDATION = 2_000
_MOST = 50_000  # windows of a running text that are tokenized
_PROBLEM_BYTES = 96  # of an arithmetic problem in the chat format, at most
_REAL_IMAGES = [name for name, source in hub.SOURCES.items() if source.classes]
_IMAGES = ("synthetic-images", *_REAL_IMAGES)
NAMES = (*_IMAGES, "arithmetic", *(name for name in hub.SOURCES if name not in _IMAGES))

Read = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


class DataWarning(UserWarning):
    """Another dataset than the one asked for is used."""


class SampleShape(NamedTuple):
    """Sizes of a sample, those that its dataset has."""

    image: int = 32  # pixels of a side
    classes: int = 10  # of generated images
    sequence: int = 128  # tokens


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
        # (count, size / count): a rank's samples are a row
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
        samples = np.empty_like(numbers)
        # a batch may end one epoch and begin the next, each with an order of its own
        for epoch in set(numbers // count):
            order = np.random.default_rng([seed, epoch, 3]).permutation(count)
            inside = numbers // count == epoch
            samples[inside] = order[numbers[inside] % count]
        return samples


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
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    for spelling in NAMES:
        if spelling.replace("-", "") == plain:
            return spelling
    near = difflib.get_close_matches(name.lower(), NAMES, n=3, cutoff=0.0)
    raise ValueError(f"unknown data {name!r}; nearest: {', '.join(near)}")


def get_data(
    name: str,
    shape: SampleShape = SampleShape(),  # noqa: B008  # immutable
    by: str = "bytes",
    seed: int = 0,
    allow_download: bool = False,
) -> Data:
    """The dataset of a name, without a download unless `allow_download`.

    by: the tokenizer, bytes or one of Hugging Face by name or folder. seed: of
    generated data. What is not on this machine is replaced by generated data of its
    kind, with a DataWarning. Raises ValueError for an unknown name.
    """
    name = canonical(name)
    kind = kind_of(name)
    fall_back = default_name(kind)

    def generated(tokens):
        if kind == "text":
            return _problems(shape, seed, tokens)
        read = SyntheticImages(shape.image, shape.classes, seed)
        return _generated(fall_back, read, classes=shape.classes)

    try:
        tokens = tokenizer(by, allow_download) if kind == "text" else None
        if name == fall_back:
            return generated(tokens)
        if kind == "text":
            return _real_text(name, allow_download, shape.sequence, tokens)
        parts = hub.read(name, allow_download, shape.image)
        sizes = {split: len(part) for split, part in parts.items()}
        return Data(name, kind, sizes, parts, classes=hub.SOURCES[name].classes)
    except (ModuleNotFoundError, FileNotFoundError) as reason:
        if (
            name == fall_back
        ):  # it lacks its tokenizer: there is nothing to fall back to
            raise
        note = f"{fall_back} in place of {name}: {reason}"
        warnings.warn(note, DataWarning, stacklevel=2)
        return replace(generated(tokenizer("bytes")), note=note)


def _problems(shape, seed, tokens):
    """Arithmetic, as many problems per sample as surely fit."""
    many = max(shape.sequence // _PROBLEM_BYTES, 1)

    def problems(index):
        numbers = range(many * index, many * (index + 1))
        return [_arithmetic_problem(number, seed) for number in numbers]

    read = _examples(problems, shape.sequence, tokens)
    return _generated("arithmetic", read, vocab=tokens.vocab)


def _examples(pairs_of, sequence, tokens):
    """A function that reads samples of (question, answer) pairs, which `pairs_of` gives
    by number, in the format of a chat.

    Tokens are made when a sample is drawn, so that a dataset may have any length.
    """

    def sample(index):
        turns = [tokens.chat(*pair) for pair in pairs_of(index)]
        return example(turns, sequence, tokens.pad)

    def read(indices):
        inputs, targets = zip(*map(sample, indices.tolist()), strict=True)
        return np.stack(inputs), np.stack(targets)

    return read


def _generated(name, read, **more):
    """Generated data: samples of validation are those after the ones to train on."""
    sizes = {"train": _GENERATED, "validation": _VALIDATION}
    parts = {"train": read, "validation": lambda indices: read(indices + _GENERATED)}
    return Data(name, "images" if "classes" in more else "text", sizes, parts, **more)


def _real_text(name, allow_download, sequence, tokens):
    sizes = {}
    read = {}
    for split, texts in hub.read(name, allow_download).items():
        # defaults of the functions bind what is of this split
        if not isinstance(texts[0], str):
            sizes[split] = len(texts)
            pairs_of = lambda index, pairs=texts: [pairs[index]]  # noqa: E731
            read[split] = _examples(pairs_of, sequence, tokens)
            continue
        make = partial(windows, texts, tokens, sequence, _MOST)
        # all that the tokens depend on
        key = chain([name, split, tokens.name, str(sequence)], texts)
        inputs, targets = cached_tokens(key, make)
        sizes[split] = len(inputs)
        read[split] = lambda indices, x=inputs, y=targets: (x[indices], y[indices])
    return Data(name, "text", sizes, read, vocab=tokens.vocab)


class SyntheticImages:
    """Class-conditional images: a low-frequency pattern for each class, plus noise.

    image: pixels of a side. classes: number of patterns. seed: of the patterns and the
    samples.
    """

    def __init__(self, image: int, classes: int, seed: int):
        self.seed = seed
        random = np.random.default_rng([seed, classes])
        # (classes, colours, waves, rows, columns); the last two stretch over the image
        shape = (classes, 3, _WAVES, 1, 1)
        down = random.integers(0, 4, shape)
        across = random.integers(0, 4, shape)
        phase = random.uniform(0, 1, shape)
        position = np.arange(image) / image
        # down a column as (image, 1), along a row as (image,)
        turns = down * position[:, None] + across * position + phase
        waves = np.cos(2 * np.pi * turns)
        self.patterns = waves.mean(axis=2).astype(np.float32)

    def __call__(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Images (n, 3, image, image) float32 and labels (n,) int64 of the samples."""
        labels = np.asarray(indices) % len(self.patterns)
        images = self.patterns[labels]
        for image, index in zip(images, indices, strict=True):
            noise = np.random.default_rng([self.seed, 1, index]).bytes(image.size)
            # one signed byte per pixel and colour, in the shape of the image
            image += _NOISE * np.frombuffer(noise, dtype=np.int8).reshape(image.shape)
        return images, labels.astype(np.int64)


def _arithmetic_problem(index, seed):
    """Question and answer of a word problem on numbers below 100.

    >>> _arithmetic_problem(0, 0)
    ('Ina has 41 apples and gets 30 more. How many apples?', '41 + 30 = 71')
    """
    random = np.random.default_rng([seed, 2, index])
    name = _NAMES[random.integers(len(_NAMES))]
    thing = _THINGS[random.integers(len(_THINGS))]
    b, a = sorted(random.integers(2, 100, 2).tolist())
    match random.integers(3):
        case 0:
            story = f"{a} {thing} and gets {b} more"
            answer = f"{a} + {b} = {a + b}"
        case 1:
            story = f"{a} {thing} and gives {b} away"
            answer = f"{a} - {b} = {a - b}"
        case _:
            b = b % 10 + 2  # products stay below a thousand or so
            story = f"{b} boxes of {a} {thing}"
            answer = f"{b} * {a} = {b * a}"
    return f"{name} has {story}. How many {thing}?", answer
