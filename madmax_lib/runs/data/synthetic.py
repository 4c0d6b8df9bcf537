"""What can a model learn where no dataset is at hand? Images with a pattern per class,
and arithmetic word problems.

Both are generated: sample i is always the same for a seed, whoever draws it, so that a
loss curve can be tested.
"""

import numpy as np

__all__ = ["SyntheticImages", "arithmetic_problem"]

# cosines per class and colour: low frequencies, which patches of any size can see
_WAVES = 3
_NOISE = (
    0.6 / ((2**16 - 1) / 12) ** 0.5
)  # times a random byte: a standard deviation of 0.6, beside patterns of about 1
_NAMES = ("Ada", "Ben", "Cem", "Dia", "Eva", "Fei", "Gus", "Ina")
_THINGS = ("apples", "books", "coins", "eggs", "maps", "pens", "shells", "stamps")


class SyntheticImages:
    """Class-conditional images: a low-frequency pattern for each class, plus noise.

    image: pixels of a side. classes: number of patterns. seed: of the patterns and the
    samples.
    """

    def __init__(self, image: int, classes: int, seed: int):
        self.seed = seed
        random = np.random.default_rng([seed, classes])
        shape = (classes, 3, _WAVES, 1, 1)
        rows = random.integers(0, 4, shape)
        columns = random.integers(0, 4, shape)
        phase = random.uniform(0, 1, shape)
        position = np.arange(image) / image
        waves = np.cos(
            2 * np.pi * (rows * position[:, None] + columns * position + phase)
        )
        self.patterns = waves.mean(axis=2).astype(np.float32)

    def __call__(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Images (n, 3, image, image) float32 and labels (n,) int64 of the samples."""
        labels = np.asarray(indices) % len(self.patterns)
        images = self.patterns[labels]
        for image, index in zip(images, indices, strict=True):
            noise = np.random.default_rng([self.seed, 1, index]).bytes(image.size)
            image += np.float32(_NOISE) * np.frombuffer(noise, dtype=np.int8).reshape(
                image.shape
            )
        return images, labels.astype(np.int64)


def arithmetic_problem(index: int, seed: int) -> tuple[str, str]:
    """Question and answer of a word problem on numbers below 100.

    >>> arithmetic_problem(0, 0)
    ('Ina has 41 apples and gets 30 more. How many apples?', '41 + 30 = 71')
    """
    random = np.random.default_rng([seed, 2, index])
    name = _NAMES[random.integers(len(_NAMES))]
    thing = _THINGS[random.integers(len(_THINGS))]
    a, b = sorted(random.integers(2, 100, 2).tolist(), reverse=True)
    kind = random.integers(3)
    if kind == 0:
        return (
            f"{name} has {a} {thing} and gets {b} more. How many {thing}?",
            f"{a} + {b} = {a + b}",
        )
    if kind == 1:
        return (
            f"{name} has {a} {thing} and gives {b} away. How many {thing}?",
            f"{a} - {b} = {a - b}",
        )
    b = b % 10 + 2
    return (
        f"{name} has {b} boxes of {a} {thing}. How many {thing}?",
        f"{b} * {a} = {b * a}",
    )
