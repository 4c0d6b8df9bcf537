"""Generated data where no dataset is at hand: images with a pattern per class, and
arithmetic word problems.

Sample i is always the same for a seed, whoever draws it, so that a loss curve can be
tested.
"""

import numpy as np

__all__ = ["SyntheticImages", "arithmetic_problem"]

# cosines per class and colour: low frequencies, which patches of any size can see
_WAVES = 3
# The noise is a random signed byte, whose variance is (2^16 - 1) / 12, times this: a
# standard deviation of 0.6, beside patterns of about 1.
_NOISE = np.float32(0.6 / ((2**16 - 1) / 12) ** 0.5)
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


def arithmetic_problem(index: int, seed: int) -> tuple[str, str]:
    """Question and answer of a word problem on numbers below 100.

    >>> arithmetic_problem(0, 0)
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
