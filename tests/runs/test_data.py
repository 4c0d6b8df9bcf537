"""Data by name: the same batch on every rank, questions and padding masked, fall-backs
that say why.
"""

import sys
from itertools import combinations
from threading import Event
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from support import cells, refused

from madmax_lib.runs.data import batches, hub, text
from madmax_lib.runs.data.batches import (
    DataWarning,
    SampleShape,
    SyntheticImages,
    _arithmetic_problem,
    get_data,
)
from madmax_lib.runs.data.text import _PAD, BYTES, MASKED, cached_tokens, windows


def data_of(name, **sizes):
    return get_data(name, SampleShape(**sizes))


@pytest.mark.parametrize("name", ["synthetic-images", "arithmetic"])
@pytest.mark.parametrize(("step", "ranks"), [(0, 1), (7, 3), (7, 2)])
def test_ranks_share_a_batch_that_depends_on_seed_and_step_alone(name, step, ranks):
    one, other = get_data(name, seed=3), get_data(name, seed=3)
    shares = [other.batch(step, 6, 3, share=(rank, ranks)) for rank in range(ranks)]
    for key, array in one.batch(step, 6, 3).items():
        assert np.array_equal(array, np.concatenate([share[key] for share in shares]))
    with refused("dp=4 does not divide & 6 samples"):
        one.batch(0, 6, share=(0, 4))


@pytest.mark.parametrize("name", ["synthetic-images", "arithmetic"])
def test_batches_of_steps_and_of_splits_differ(name):
    data = get_data(name, seed=3)
    key = next(iter(data.batch(0, 6)))
    drawn = [data.batch(*asked)[key] for asked in ((0, 6, 3), (1, 6, 3), (0, 6, 4))]
    samples = [data.read[split](np.arange(20))[0] for split in ("train", "validation")]
    for first, second in (*combinations(drawn, 2), samples):
        assert not np.array_equal(first, second)


@pytest.mark.parametrize("threads", [1, 3])
def test_batches_are_drawn_ahead_and_come_in_order(threads):
    def draw(step):
        drawn[step].set()
        return 10 // (8 - step)

    drawn = [Event() for _ in range(9)]
    coming = batches.draw_ahead(draw, range(9), threads)
    assert next(coming) == 1
    # without being asked for
    assert all(event.wait(30) for event in drawn[: threads + 1])
    assert not any(event.is_set() for event in drawn[threads + 1 :])
    assert [next(coming) for _ in range(7)] == [10 // (8 - n) for n in range(1, 8)]
    with pytest.raises(ZeroDivisionError):  # of step 8
        next(coming)


@pytest.mark.parametrize(("count", "size"), [(10, 3), (10, 10), (4, 7), (1, 2)])
def test_every_epoch_has_every_sample_once_and_no_batch_is_short(count, size):
    data = get_data("arithmetic")
    data.sizes["train"] = count
    drawn = np.concatenate([data.indices(step, size) for step in range(count)])
    assert len(drawn) == count * size
    for epoch in drawn.reshape(-1, count):
        assert sorted(epoch) == list(range(count))
    if count > 4:
        assert list(drawn[:count]) != list(drawn[count : 2 * count])


def test_images_have_the_asked_shape_and_a_pattern_per_class():
    data = data_of("synthetic-images", image=16, classes=5)
    images, labels = data.batch(0, 40).values()
    assert images.shape == (40, 3, 16, 16)
    assert (images.dtype, labels.dtype) == (np.float32, np.int64)
    assert data.classes == 5 and set(labels) <= set(range(5))
    # learnable: the nearest pattern is the class
    apart = images[:, None] - SyntheticImages(16, 5, 0).patterns
    assert ((apart**2).sum((2, 3, 4)).argmin(axis=1) == labels).all()


@pytest.mark.parametrize("index", range(40))
def test_arithmetic_answers_are_right(index):
    question, answer = _arithmetic_problem(index, 5)
    left, right = answer.split(" = ")
    assert eval(left) == int(right) >= 0
    assert sum(map(len, BYTES.chat(question, answer))) <= 96
    numbers = {word for word in left.split() if word.isdigit()}
    assert numbers <= set(question.replace(".", "").split())


@pytest.mark.parametrize("sequence", [8, 32, 128, 256, 300])
def test_only_answers_are_targets(sequence):
    data = data_of("arithmetic", sequence=sequence)
    tokens, targets = data.batch(0, 5).values()
    assert tokens.shape == targets.shape == (5, sequence)
    assert tokens.dtype == targets.dtype == np.int64
    assert ((targets != MASKED).sum(axis=1) >= min(sequence, 8)).all()
    # a target is the token that follows
    shifted = targets[:, :-1]
    assert (shifted == tokens[:, 1:])[shifted != MASKED].all()
    assert tokens.max() < data.vocab and not (targets == _PAD).any()
    if sequence == 128:
        number = int(data.indices(0, 5)[0])
        assert answers(targets)[0] == _arithmetic_problem(number, 0)[1]


def answers(targets):
    """Texts of the bytes that count."""
    rows = [[token for token in row if 0 <= token < 256] for row in targets]
    return [bytes(row).decode() for row in rows]


@pytest.mark.parametrize(
    ("turns", "sequence", "tokens", "targets"),
    [
        ([([1, 2], [3])], 2, [1, 2], [MASKED, 3]),
        ([([1, 2], [3])], 4, [1, 2, 3, _PAD], [MASKED, 3, MASKED, MASKED]),
        ([([1, 2, 3], [4, 5])], 2, [3, 4], [4, 5]),
        ([([1], [2]), ([3], [4])], 3, [1, 2, 3], [2, MASKED, 4]),
        ([([], [1, 2, 3])], 2, [1, 2], [2, 3]),
    ],
)
def test_example(turns, sequence, tokens, targets):
    parts = [part.tolist() for part in text.example(turns, sequence)]
    assert parts == [tokens, targets]


def test_running_text_is_one_stream_cut_into_windows():
    tokens, targets = windows(["abcd", "efg"], BYTES, 3, most=5)
    assert bytes(tokens.ravel().tolist()) == b"abcdef"
    assert bytes(targets.ravel().tolist()) == b"bcdefg"
    assert len(windows(["abcd", "efg"], BYTES, 3, most=1)[0]) == 1
    with refused("sequence=9 & longer than the text of 4 tokens"):
        windows(["abcd"], BYTES, 9, most=5)


def test_tokens_are_cached_by_key(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "cache_folder", lambda: tmp_path)
    calls = []

    def make():
        calls.append(1)
        return windows(["one? 1", "two? 2"], BYTES, 4, most=9)

    results = [cached_tokens("a", make), cached_tokens("a", make)]
    assert len(calls) == 1 and all(map(np.array_equal, *results))
    cached_tokens("b", make)
    assert len(calls) == 2


@pytest.mark.parametrize("spelling", ["CIFAR100", "cifar_100", "Cifar-100"])
def test_names_are_forgiving(spelling):
    assert batches.canonical(spelling) == "cifar-100"
    with refused("unknown data 'cifar10'; nearest: cifar-100"):
        get_data("cifar10")


REAL = set(batches.NAMES) - {batches.default_name(batches.kind_of(n)) for n in batches.NAMES}  # fmt: skip


@pytest.mark.parametrize("name", sorted(REAL))
def test_what_is_not_here_is_replaced_and_says_so(name, monkeypatch):
    monkeypatch.setattr(hub, "find_spec", lambda package: None)
    with pytest.warns(DataWarning, match=f"in place of {name}: "):
        data = get_data(name)
    assert data.name == batches.default_name(batches.kind_of(name))
    assert name in data.note


@pytest.mark.parametrize(
    "read", [text.tokenizer, lambda by: get_data("arithmetic", by=by)]
)
def test_a_missing_tokenizer_is_a_fall_back_too(monkeypatch, read):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with refused("transformers", error=ModuleNotFoundError):
        read("Qwen/Qwen2.5-3B")


class Table(list):
    """What the loader asks of a table of `datasets`."""

    _fingerprint = "1234"

    def __getitem__(self, key):
        if isinstance(key, str):
            return [row[key] for row in self]
        return super().__getitem__(key)

    def train_test_split(self, test_size, shuffle):
        cut = int(len(self) * (1 - test_size))
        return {"train": Table(self[:cut]), "test": Table(self[cut:])}


GREY = [Image.new("L", (2, 2), 255 * (number % 2)) for number in range(4)]
ROWS = {
    "uoft-cs/cifar100": [
        {"img": p, "fine_label": 98 + i % 2} for i, p in enumerate(GREY)
    ],
    "meta-math/MetaMathQA": [
        {"query": f"what is {i}?", "response": f"it is {i}"} for i in range(100)
    ],
    "nyu-mll/glue": [
        {"sentence": f"film {i}", "sentence1": "a", "sentence2": "b", "label": i % 2}
        for i in range(6)
    ],
    "Salesforce/wikitext": [{"text": "the quick brown fox " * 20}] * 3,
}


@pytest.fixture
def hugging_face(monkeypatch, tmp_path):
    """A stand-in for `datasets` with a few rows, and whether it was asked to stay
    offline.
    """
    requests = []

    def load_dataset(path, config, *, split, data_files):
        requests.append((split, package.config.HF_HUB_OFFLINE))
        if path not in ROWS:
            raise ConnectionError(f"Couldn't reach {path}\nsecond line")
        return Table(ROWS[path])

    names = ("datasets", "huggingface_hub", "huggingface_hub.constants")
    package, library, constants = map(ModuleType, names)
    package.config = SimpleNamespace(HF_HUB_OFFLINE=False)
    package.load_dataset = load_dataset
    library.constants = constants
    constants.HF_HUB_OFFLINE = False
    for module in (package, library, constants):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(hub, "find_spec", lambda name: name == "datasets")
    for module in (text, hub):
        monkeypatch.setattr(module, "cache_folder", lambda: tmp_path)
    return requests


def test_real_images_are_scaled_labelled_and_decoded_once(hugging_face, monkeypatch):
    data = data_of("cifar-100", image=8)
    images, labels = first = data.read["train"](np.array([1, 2]))
    assert images.shape == (2, 3, 8, 8)
    assert images[0].max() == 1 and images[1].min() == -1
    assert labels.tolist() == [99, 98]
    assert data.classes == 100 and not data.note
    assert hugging_face == [("train", True), ("test", True)]
    monkeypatch.setattr(Image.Image, "convert", lambda *_: 1 / 0)
    again = data_of("cifar-100", image=8).read["train"]
    assert all(map(np.array_equal, first, again(np.array([1, 2]))))
    smaller = data_of("cifar-100", image=4).read["train"]
    for read, index in ((again, 0), (again, 3), (smaller, 1)):
        with pytest.raises(ZeroDivisionError):
            read(np.array([index]))


@pytest.mark.parametrize("download", [False, True])
def test_downloads_only_when_allowed(hugging_face, download):
    get_data("glue", allow_download=download)
    assert all(offline is not download for _, offline in hugging_face)
    assert not sys.modules["datasets"].config.HF_HUB_OFFLINE  # as it was


def test_one_split_is_cut_and_its_questions_are_masked(hugging_face, monkeypatch):
    monkeypatch.setattr(batches, "_MOST", 10)  # of running text alone
    data = data_of("metamathqa", sequence=64)
    assert data.sizes == {"train": 98, "validation": 2}
    expected = [f"it is {index}" for index in data.indices(0, 4)]
    assert answers(data.batch(0, 4)["targets"]) == expected


def test_labels_become_words_and_running_text_has_no_mask(hugging_face):
    batch = data_of("glue", sequence=64).batch(0, 6)
    assert set(answers(batch["targets"])) == {"negative", "positive"}
    pairs = data_of("glue-rte", sequence=64).batch(0, 6)
    assert set(answers(pairs["targets"])) == {"entailment", "not_entailment"}
    assert answers(pairs["tokens"])[0].startswith("user\na\nb\n")
    targets = data_of("wikitext-103", sequence=32).batch(0, 3)["targets"]
    assert (targets >= 0).all() and targets.dtype == np.int64


@pytest.mark.parametrize(
    ("name", "rows", "says"),
    cells("""
    cifar-100 | [] | train data of cifar-100: no samples
    cifar-100 | [{"img": None, "fine_label": 100}] | cifar-100 & label 100 of sample 0 & 0..99
    glue | [{"sentence": "a", "label": 1}, {"sentence": "b", "label": -1}] | label -1 of sample 1
    glue | [{"sentence": None, "label": 1}] | glue: sentence of sample 0 is no text
    wikitext-103 | [{"text": "a"}, {"text": None}] | text of sample 1 is no text
    wikitext-103 | [{"text": ""}] | sequence=128 & longer than the text of 0
    """),
)
def test_rows_that_cannot_be_learned_from_are_named(
    hugging_face, monkeypatch, name, rows, says
):
    monkeypatch.setitem(ROWS, hub.SOURCES[name].path, rows)
    with refused(says):
        get_data(name)


def test_a_damaged_image_is_told_by_its_number(hugging_face, monkeypatch):
    def convert(*_):
        raise OSError("image file is truncated")

    data = data_of("cifar-100", image=8)
    monkeypatch.setattr(Image.Image, "convert", convert)
    with refused("image 2 & cannot be read & file is truncated", error=OSError):
        data.read["train"](np.array([2]))


class Shifted:
    """A tokenizer that writes the length of a text, shifted."""

    chat_template = None
    pad_token_id = eos_token_id = 0

    def __init__(self, shift):
        self.shift = shift

    def __len__(self):
        return 200

    def encode(self, text, **_):
        return [self.shift + len(text)] * 20

    def get_vocab(self):
        return {"a": self.shift}


def test_tokens_follow_every_text_and_the_tokenizer_itself(
    hugging_face, monkeypatch, tmp_path
):
    def first(by):
        data = get_data("wikitext-103", SampleShape(sequence=8), by)
        return data.read["train"](np.arange(3))[0].tolist()

    # another tokenizer each time, under the same name
    make = SimpleNamespace(from_pretrained=lambda *_, **__: Shifted(len(tokens)))
    library = SimpleNamespace(AutoTokenizer=make)
    monkeypatch.setitem(sys.modules, "transformers", library)
    tokens = []
    for middle in ("two", "six"):
        rows = [{"text": text * 40} for text in ("", middle, "")]
        monkeypatch.setitem(ROWS, "Salesforce/wikitext", rows)
        tokens.append(first("bytes"))
    for _ in range(2):
        tokens.append(first("folder"))
    assert all(one != other for one, other in combinations(tokens, 2))
    files = list(tmp_path.glob("tokens/*"))
    for damaged in (b"", b"PK\x03\x04", files[0].read_bytes()[:-30]):
        for path in files:
            path.write_bytes(damaged)
        assert len(first("folder")) == 3


@pytest.mark.parametrize(
    ("name", "instead", "says"),
    cells("""
    c4 | arithmetic | not on this machine .*ConnectionError: Couldn't reach allenai/c4.$
    food-101 | synthetic-images | could not be read .ZeroDivisionError: division by zero.$
    """),
)
def test_a_dataset_that_is_absent_or_broken_is_replaced(
    hugging_face, monkeypatch, name, instead, says
):
    if name == "food-101":
        package = sys.modules["datasets"]
        monkeypatch.setattr(package, "load_dataset", lambda *_, **__: 1 / 0)
    with pytest.warns(DataWarning, match=f"in place of {name}: {name} .*{says}"):
        assert get_data(name).name == instead
