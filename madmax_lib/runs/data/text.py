"""Tokens and targets of text: bytes or a Hugging Face tokenizer, chat template, masks,
packing, a cache.

Targets are shifted by one: targets[t] is the token that follows tokens[t]. MASKED
(-100) are the targets that do not count: the question and the padding. Byte tokens are
the bytes themselves, then the padding (256) and the marks of ChatML, the chat format of
Qwen2.5 [its tokenizer_config.json].
"""

import hashlib
from collections.abc import Callable, Iterable
from contextlib import suppress

import numpy as np

from madmax_lib.base.atomic import replacing
from madmax_lib.base.extras import with_extra
from madmax_lib.catalog.datasets import cache_folder

MASKED = -100  # torch's cross_entropy leaves it out by default, as all frameworks do
_PAD = 256
_START = 257
_END = 258

Arrays = tuple[np.ndarray, np.ndarray]  # tokens and targets


class _BytesTokenizer:
    """Tokens are the bytes of the text in UTF-8; three more are padding and the marks
    of a turn.
    """

    name = "bytes"
    vocab = 259
    pad = _PAD

    def encode(self, text):
        """Tokens of a text.

        >>> BYTES.encode("7 + 5")
        [55, 32, 43, 32, 53]
        """
        return list(text.encode())

    def chat(self, question, answer):
        """A question up to the mark of the answer, and the answer with its end."""
        user = self.encode(f"user\n{question}")
        assistant = self.encode("assistant\n")
        prompt = [_START, *user, _END, *self.encode("\n"), _START, *assistant]
        return prompt, [*self.encode(answer), _END]


BYTES = _BytesTokenizer()


class _HubTokenizer:
    """A tokenizer of `transformers` with the same attributes and methods."""

    def __init__(self, name, allow_download):
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise ModuleNotFoundError(
                f"tokenizer {name!r} needs transformers: {with_extra(error)}"
            ) from None
        try:
            theirs = AutoTokenizer.from_pretrained(
                name, local_files_only=not allow_download
            )
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise FileNotFoundError(
                f"tokenizer {name!r} is not on this machine: {reason}"
            ) from None
        self._theirs = theirs
        self.vocab = len(theirs)
        # the name is a key of the cache of tokens, and another tokenizer may take its
        # folder: add what it does to a text
        backend = getattr(theirs, "backend_tokenizer", None)
        rules = backend.to_str() if backend else sorted(theirs.get_vocab().items())
        self.name = f"{name} {_digest([str(rules), str(theirs.chat_template)])}"
        ends = (theirs.pad_token_id, theirs.eos_token_id)
        self.pad = next((token for token in ends if token is not None), 0)

    def encode(self, text):
        return self._theirs.encode(text, add_special_tokens=False)

    def chat(self, question, answer):
        if self._theirs.chat_template is None:
            prompt = self.encode(f"Question: {question}\nAnswer: ")
            return prompt, [*self.encode(answer), self.pad]
        user = {"role": "user", "content": question}
        assistant = {"role": "assistant", "content": answer}
        render = self._theirs.apply_chat_template
        prompt = render([user], tokenize=False, add_generation_prompt=True)
        dialogue = render([user, assistant], tokenize=False)
        return self.encode(prompt), self.encode(dialogue[len(prompt) :])


def _digest(parts):
    digest = hashlib.sha256()
    for part in parts:
        # the zero byte ends a part: "a", "bc" is another key than "ab", "c"
        digest.update(part.encode(errors="replace") + b"\0")
    return digest.hexdigest()[:24]


def tokenizer(name: str, allow_download: bool = False):
    """The tokenizer called `bytes`, or one of Hugging Face by name or folder.

    Raises ModuleNotFoundError without transformers and FileNotFoundError for a
    tokenizer that is not here.
    """
    return BYTES if name == "bytes" else _HubTokenizer(name, allow_download)


def example(
    turns: list[tuple[list[int], list[int]]], sequence: int, pad: int = _PAD
) -> Arrays:
    """Tokens and targets (sequence,) int64 of questions with their answers, questions
    and padding masked.

    What is too long loses its beginning, so that the last answer stays.

    >>> example([([1, 2, 3], [7, 8])], 6)
    (array([  1,   2,   3,   7,   8, 256]), array([-100, -100,    7,    8, -100, -100]))
    """
    tokens = []
    counted = []
    for question, answer in turns:
        tokens += question + answer
        counted += [MASKED] * len(question) + answer
    # a token more than the sequence, as targets are shifted by one
    padding = sequence + 1 - len(tokens)
    tokens = (tokens + [pad] * padding)[-(sequence + 1) :]
    counted = (counted + [MASKED] * padding)[-(sequence + 1) :]
    return np.array(tokens[:-1]), np.array(counted[1:])


def windows(texts: Iterable[str], by, sequence: int, most: int) -> Arrays:
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
    stream = np.concatenate(parts)[: count * sequence + 1]
    # windows are rows; the targets of a window are the same stream, one token later
    shape = (count, sequence)
    return stream[:-1].reshape(shape), stream[1:].reshape(shape)


def cached_tokens(key: Iterable[str], make: Callable[[], Arrays]) -> Arrays:
    """Result of `make`, from the user's cache where it has been stored under the same
    key: all that it depends on.
    """
    path = cache_folder() / "tokens" / f"{_digest(key)}.npz"
    # a damaged file raises as it likes, and is made anew
    with suppress(Exception), np.load(path) as stored:
        return stored["tokens"], stored["targets"]
    tokens, targets = make()
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, tokens=tokens, targets=targets)
    return tokens, targets
