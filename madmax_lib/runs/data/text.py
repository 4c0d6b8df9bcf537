"""How does text become tokens and targets? Bytes or a Hugging Face tokenizer, chat
template, masks, packing, a cache.

Targets are shifted by one: targets[t] is the token that follows tokens[t]. MASKED
(-100) are the targets that do not
count: the question and the padding. Byte tokens are the bytes themselves, then the
padding (256) and the marks of ChatML, the chat format of Qwen2.5 [its
tokenizer_config.json].
"""

import hashlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import islice

import numpy as np

from madmax_lib.base.atomic import replacing
from madmax_lib.catalog.datasets import cache_folder

__all__ = [
    "BYTES",
    "MASKED",
    "cached_tokens",
    "chat",
    "example",
    "tokenizer",
    "windows",
]

MASKED = -100
_PAD = 256
_START = 257
_END = 258


class _BytesTokenizer:
    """Tokens are the bytes of the text in UTF-8; three more are padding and the marks
    of a turn.
    """

    name = "bytes"
    vocab = 259
    pad = _PAD

    def encode(self, text: str) -> list[int]:
        """Tokens of a text.

        >>> BYTES.encode("7 + 5")
        [55, 32, 43, 32, 53]
        """
        return list(text.encode())

    def chat(self, question: str, answer: str) -> tuple[list[int], list[int]]:
        """A question up to the mark of the answer, and the answer with its end."""
        user = self.encode(f"user\n{question}")
        assistant = self.encode("assistant\n")
        prompt = [_START, *user, _END, *self.encode("\n"), _START, *assistant]
        return prompt, [*self.encode(answer), _END]


BYTES = _BytesTokenizer()


class _HubTokenizer:
    """A tokenizer of `transformers` with the same attributes and methods."""

    def __init__(self, name: str, allow_download: bool):
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise ModuleNotFoundError(
                f"tokenizer {name!r} needs the package transformers ({error})"
            ) from None
        try:
            self._own = AutoTokenizer.from_pretrained(
                name, local_files_only=not allow_download
            )
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise FileNotFoundError(
                f"tokenizer {name!r} is not on this machine: {reason}"
            ) from None
        self.vocab = len(self._own)
        table = getattr(self._own, "backend_tokenizer", None)
        parts = table.to_str() if table else sorted(self._own.get_vocab().items())
        # another may take its folder
        self.name = f"{name} {_digest([str(parts), str(self._own.chat_template)])}"
        self.pad = next(
            (
                t
                for t in (self._own.pad_token_id, self._own.eos_token_id)
                if t is not None
            ),
            0,
        )

    def encode(self, text: str) -> list[int]:
        return self._own.encode(text, add_special_tokens=False)

    def chat(self, question: str, answer: str) -> tuple[list[int], list[int]]:
        if self._own.chat_template is None:
            return self.encode(f"Question: {question}\nAnswer: "), [
                *self.encode(answer),
                self.pad,
            ]
        turns = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
        prompt = self._own.apply_chat_template(
            turns[:1], tokenize=False, add_generation_prompt=True
        )
        whole = self._own.apply_chat_template(turns, tokenize=False)
        return self.encode(prompt), self.encode(whole[len(prompt) :])


def _digest(parts: Iterable[str]) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part.encode(errors="replace") + b"\0")
    return whole.hexdigest()[:24]


def tokenizer(name: str, allow_download: bool = False):
    """The tokenizer called `bytes`, or one of Hugging Face by name or folder.

    Raises ModuleNotFoundError without transformers and FileNotFoundError for a
    tokenizer that is not here.
    """
    return BYTES if name == "bytes" else _HubTokenizer(name, allow_download)


def example(
    turns: list[tuple[list[int], list[int]]], sequence: int, pad: int = _PAD
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and targets (sequence,) int64 of questions with their answers, questions
    and padding masked.

    What is too long loses its beginning, so that the last answer stays.

    >>> example([([1, 2, 3], [7, 8])], 6)
    (array([  1,   2,   3,   7,   8, 256]), array([-100, -100,    7,    8, -100, -100]))
    """
    row = np.array(
        [token for turn in turns for part in turn for token in part], dtype=np.int64
    )
    counts = np.array(
        [answer for turn in turns for answer, part in enumerate(turn) for _ in part],
        dtype=bool,
    )
    row = row[-(sequence + 1) :]
    counts = counts[-(sequence + 1) :]
    counted = np.where(counts, row, MASKED)
    after = (0, sequence + 1 - len(row))
    return np.pad(row, after, constant_values=pad)[:-1], np.pad(
        counted, after, constant_values=MASKED
    )[1:]


def chat(
    pairs: Iterable[tuple[str, str]], by, sequence: int, most: int
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and targets (n, sequence) int32 of the first `most` (question, answer)
    pairs, in the format of a chat.
    """
    rows = [example([by.chat(*pair)], sequence, by.pad) for pair in islice(pairs, most)]
    return tuple(np.stack(part).astype(np.int32) for part in zip(*rows, strict=True))


def windows(
    texts: Iterable[str], by, sequence: int, most: int
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and targets (n, sequence) int32 of running text: one stream, cut into at
    most `most` windows.

    Raises ValueError for a text that does not fill one window.
    """
    parts = []
    length = 0
    for text in texts:
        parts.append(np.array(by.encode(text), dtype=np.int32))
        length += len(parts[-1])
        if length > most * sequence:
            break
    count = min((length - 1) // sequence, most)
    if count < 1:
        raise ValueError(
            f"sequence={sequence} is longer than the text of {length} tokens"
        )
    stream = np.concatenate(parts)
    cut = count * sequence
    return stream[:cut].reshape(count, sequence), stream[1 : cut + 1].reshape(
        count, sequence
    )


def cached_tokens(
    key: Iterable[str], make: Callable[[], tuple[np.ndarray, ...]]
) -> tuple[np.ndarray, ...]:
    """Result of `make`, from the user's cache where it has been stored under the same
    key: all that it depends on.
    """
    path = cache_folder() / "tokens" / f"{_digest(key)}.npz"
    with (
        suppress(Exception),
        np.load(path) as stored,
    ):  # a damaged file raises as it likes, and is made anew
        return stored["tokens"], stored["targets"]
    tokens, targets = make()
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, tokens=tokens, targets=targets)
    return tokens, targets
