"""Data by name: the same batch on every rank, questions and padding masked, fall-backs
that say why.
"""

import sys
from threading import Event
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from madmax_lib.runs.data import hub, text
from madmax_lib.runs.data.batches import (
    NAMES,
    DataWarning,
    canonical,
    default_name,
    draw_ahead,
    get_data,
    kind_of,
)
from madmax_lib.runs.data.synthetic import SyntheticImages, arithmetic_problem
from madmax_lib.runs.data.text import (
    _PAD,
    BYTES,
    MASKED,
    cached_tokens,
    chat,
    example,
    tokenizer,
    windows,
)


@pytest.mark.parametrize("name", ["synthetic-images", "arithmetic"])
def test_a_batch_depends_on_seed_and_step_alone(name):
    one, other = get_data(name, seed=3), get_data(name, seed=3)
    for step, ranks in ((0, 1), (7, 3), (7, 2)):
        shares = [
            other.batch(step, 6, seed=3, share=(rank, ranks)) for rank in range(ranks)
        ]
        for key, array in one.batch(step, 6, seed=3).items():
            assert np.array_equal(
                array, np.concatenate([share[key] for share in shares])
            )
    with pytest.raises(ValueError, match="dp=4 does not divide a batch of 6 samples"):
        one.batch(0, 6, share=(0, 4))
    first, second = (one.batch(step, 6, seed=3) for step in (0, 1))
    assert not any(np.array_equal(first[key], second[key]) for key in first)
    assert not np.array_equal(
        first[next(iter(first))], one.batch(0, 6, seed=4)[next(iter(first))]
    )
    assert not np.array_equal(
        *(one.read[split](np.arange(20))[0] for split in ("train", "validation"))
    )


@pytest.mark.parametrize("threads", [1, 3])
def test_batches_are_drawn_ahead_and_come_in_order(threads):
    drawn = [Event() for _ in range(9)]
    batches = draw_ahead(
        lambda step: drawn[step].set() or 10 // (8 - step), range(9), threads
    )
    assert next(batches) == 1
    assert all(
        event.wait(30) for event in drawn[: threads + 1]
    )  # without being asked for
    assert not any(event.is_set() for event in drawn[threads + 1 :])
    assert [next(batches) for _ in range(7)] == [
        10 // (8 - step) for step in range(1, 8)
    ]
    with pytest.raises(ZeroDivisionError):  # of step 8
        next(batches)


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
    data = get_data("synthetic-images", image=16, classes=5)
    batch = data.batch(0, 40)
    assert (
        batch["images"].shape == (40, 3, 16, 16) and batch["images"].dtype == np.float32
    )
    assert (
        batch["labels"].dtype == np.int64
        and set(batch["labels"]) <= set(range(5))
        and data.classes == 5
    )
    patterns = SyntheticImages(16, 5, 0).patterns
    distance = ((batch["images"][:, None] - patterns) ** 2).sum(axis=(2, 3, 4))
    assert (
        distance.argmin(axis=1) == batch["labels"]
    ).all()  # learnable: the nearest pattern is the class


@pytest.mark.parametrize("index", range(40))
def test_arithmetic_answers_are_right(index):
    question, answer = arithmetic_problem(index, 5)
    left, right = answer.split(" = ")
    assert eval(left) == int(right) >= 0
    assert sum(map(len, BYTES.chat(question, answer))) <= 96
    numbers = [word for word in left.split() if word.isdigit()]
    assert all(number in question.replace(".", "").split() for number in numbers)


@pytest.mark.parametrize("sequence", [8, 32, 128, 256, 300])
def test_only_answers_are_targets(sequence):
    data = get_data("arithmetic", sequence=sequence)
    batch = data.batch(0, 5)
    tokens, targets = batch["tokens"], batch["targets"]
    assert (
        tokens.shape == targets.shape == (5, sequence)
        and tokens.dtype == targets.dtype == np.int64
    )
    assert ((targets != MASKED).sum(axis=1) >= min(sequence, 8)).all()
    shifted = targets[:, :-1]
    assert (shifted == tokens[:, 1:])[
        shifted != MASKED
    ].all()  # a target is the token that follows
    assert tokens.max() < data.vocab and not (targets == _PAD).any()
    if sequence == 128:
        row = bytes(token for token in targets[0] if 0 <= token < 256).decode()
        assert row == arithmetic_problem(int(data.indices(0, 5)[0]), 0)[1]


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
    assert [part.tolist() for part in example(turns, sequence)] == [tokens, targets]


def test_running_text_is_one_stream_cut_into_windows():
    tokens, targets = windows(["abcd", "efg"], BYTES, 3, most=5)
    assert (
        bytes(tokens.ravel().tolist()) == b"abcdef"
        and bytes(targets.ravel().tolist()) == b"bcdefg"
    )
    assert len(windows(["abcd", "efg"], BYTES, 3, most=1)[0]) == 1
    with pytest.raises(
        ValueError, match="sequence=9 is longer than the text of 4 tokens"
    ):
        windows(["abcd"], BYTES, 9, most=5)


def test_tokens_are_cached_by_key(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "cache_folder", lambda: tmp_path)
    calls = []

    def make():
        calls.append(1)
        return chat([("one?", "1"), ("two?", "2")], BYTES, 40, most=9)

    first, again = cached_tokens("a", make), cached_tokens("a", make)
    assert len(calls) == 1 and all(
        np.array_equal(*pair) for pair in zip(first, again, strict=True)
    )
    cached_tokens("b", make)
    assert len(calls) == 2


@pytest.mark.parametrize("spelling", ["CIFAR100", "cifar_100", "Cifar-100"])
def test_names_are_forgiving(spelling):
    assert canonical(spelling) == "cifar-100"
    with pytest.raises(ValueError, match="unknown data 'cifar10'; nearest: cifar-100"):
        get_data("cifar10")


@pytest.mark.parametrize(
    "name", [name for name in NAMES if name != default_name(kind_of(name))]
)
def test_what_is_not_here_is_replaced_and_says_so(name, monkeypatch):
    monkeypatch.setattr(hub, "find_spec", lambda package: None)
    with pytest.warns(DataWarning, match=f"in place of {name}: "):
        data = get_data(name)
    assert data.name == default_name(kind_of(name)) and name in data.note


def test_a_missing_tokenizer_is_a_fall_back_too(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match="transformers"):
        tokenizer("Qwen/Qwen2.5-3B")


class Table(list):
    """What the loader asks of a table of `datasets`."""

    _fingerprint = "1234"

    def __getitem__(self, key):
        return (
            [row[key] for row in self]
            if isinstance(key, str)
            else super().__getitem__(key)
        )

    def train_test_split(self, test_size, shuffle):
        cut = int(len(self) * (1 - test_size))
        return {"train": Table(self[:cut]), "test": Table(self[cut:])}


ROWS = {
    "uoft-cs/cifar100": [
        {"img": Image.new("L", (2, 2), 255 * (i % 2)), "fine_label": 98 + i % 2}
        for i in range(4)
    ],
    "meta-math/MetaMathQA": [
        {"query": f"what is {i}?", "response": f"it is {i}"} for i in range(100)
    ],
    "nyu-mll/glue": [{"sentence": f"film {i}", "label": i % 2} for i in range(6)],
    "Salesforce/wikitext": [{"text": "the quick brown fox " * 20}] * 3,
}


@pytest.fixture
def hugging_face(monkeypatch, tmp_path):
    """A stand-in for `datasets` with a few rows, and whether it was asked to stay
    offline.
    """
    requests = []

    def load_dataset(path, config, *, split, data_files):
        requests.append(
            (path, config, split, data_files, package.config.HF_HUB_OFFLINE)
        )
        if path not in ROWS:
            raise ConnectionError(f"Couldn't reach {path}\nsecond line")
        return Table(ROWS[path])

    package, library = ModuleType("datasets"), ModuleType("huggingface_hub")
    constants = ModuleType("huggingface_hub.constants")
    package.config, package.load_dataset = (
        SimpleNamespace(HF_HUB_OFFLINE=False),
        load_dataset,
    )
    constants.HF_HUB_OFFLINE, library.constants = False, constants
    for name, module in {
        "datasets": package,
        "huggingface_hub": library,
        constants.__name__: constants,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(hub, "find_spec", lambda name: name == "datasets")
    for module in (text, hub):
        monkeypatch.setattr(module, "cache_folder", lambda: tmp_path)
    return requests


def test_real_images_are_scaled_and_labelled(hugging_face):
    data = get_data("cifar-100", image=8)
    images, labels = data.read["train"](np.array([1, 2]))
    assert (
        images.shape == (2, 3, 8, 8) and images[0].max() == 1 and images[1].min() == -1
    )
    assert labels.tolist() == [99, 98] and data.classes == 100 and not data.note
    assert [(split, offline) for *_, split, _, offline in hugging_face] == [
        ("train", True),
        ("test", True),
    ]


def test_an_image_is_decoded_once(hugging_face, monkeypatch):
    first = get_data("cifar-100", image=8).read["train"](np.array([2, 1]))
    monkeypatch.setattr(Image.Image, "convert", lambda *_: 1 / 0)
    again = get_data("cifar-100", image=8).read["train"]
    assert all(map(np.array_equal, first, again(np.array([2, 1]))))
    for read, index in (
        (again, 0),
        (again, 3),
        (get_data("cifar-100", image=4).read["train"], 1),
    ):
        with pytest.raises(ZeroDivisionError):
            read(np.array([index]))


@pytest.mark.parametrize("download", [False, True])
def test_downloads_only_when_allowed(hugging_face, download):
    get_data("glue", allow_download=download)
    assert all(offline is not download for *_, offline in hugging_face)
    assert not sys.modules["datasets"].config.HF_HUB_OFFLINE  # as it was


def test_what_a_dataset_of_the_hub_is_trained_on(hugging_face):
    """One split is cut and its questions are masked; labels of GLUE become words;
    running text has no mask.
    """

    def answers(batch):
        return [
            bytes(token for token in row if 0 <= token < 256).decode()
            for row in batch["targets"]
        ]

    data = get_data("metamathqa", sequence=64)
    assert data.sizes == {"train": 98, "validation": 2}
    assert answers(data.batch(0, 4)) == [
        f"it is {index}" for index in data.indices(0, 4)
    ]
    assert set(answers(get_data("glue", sequence=64).batch(0, 6))) == {
        "negative",
        "positive",
    }
    batch = get_data("wikitext-103", sequence=32).batch(0, 3)
    assert (batch["targets"] >= 0).all() and batch["targets"].dtype == np.int64


@pytest.mark.parametrize(("name", "rows", "message"), [
    ("cifar-100", [], "train data of cifar-100: there are no samples"),
    ("cifar-100", [{"img": None, "fine_label": 100}], ("train data of cifar-100: "
        "label 100 of sample 0 is not in 0..99")),
    ("glue", [{"sentence": "good", "label": 1}, {"sentence": "bad", "label": -1}], "label -1 of sample 1 is not in"),
    ("glue", [{"sentence": None, "label": 1}], ("train data of glue: sentence of "
        "sample 0 is no text")),
    ("wikitext-103", [{"text": "a"}, {"text": None}], "text of sample 1 is no text"),
    ("wikitext-103", [{"text": ""}], "sequence=128 is longer than the text of 0 tokens"),
])  # fmt: skip
def test_rows_that_cannot_be_learned_from_are_named(
    hugging_face, monkeypatch, name, rows, message
):
    monkeypatch.setitem(ROWS, hub.SOURCES[name].path, rows)
    with pytest.raises(ValueError, match=message):
        get_data(name)


def test_a_damaged_image_is_told_by_its_number(hugging_face, monkeypatch):
    def convert(*_):
        raise OSError("image file is truncated")

    data = get_data("cifar-100", image=8)
    monkeypatch.setattr(Image.Image, "convert", convert)
    with pytest.raises(
        OSError,
        match=r"image 2 of its dataset cannot be read \(image file is truncated\)",
    ):
        data.read["train"](np.array([2]))


def test_tokens_follow_every_text_and_the_tokenizer_itself(
    hugging_face, monkeypatch, tmp_path
):
    def first():
        return (
            get_data("wikitext-103", sequence=8, by=by)
            .read["train"](np.arange(3))[0]
            .tolist()
        )

    def from_pretrained(path, local_files_only):
        shift = len(tokens)  # another tokenizer under the same name
        own = {
            "__len__": lambda self: 200,
            "encode": lambda self, text, **_: [shift + len(text)] * 20,
        }
        own |= {
            "get_vocab": lambda self: {"a": shift},
            "chat_template": None,
            "pad_token_id": 0,
            "eos_token_id": 0,
        }
        return type("Own", (), own)()

    monkeypatch.setitem(
        sys.modules,
        "transformers",
        SimpleNamespace(AutoTokenizer=SimpleNamespace(from_pretrained=from_pretrained)),
    )
    by, tokens = "bytes", []
    for middle in ("two", "six"):
        monkeypatch.setitem(
            ROWS,
            "Salesforce/wikitext",
            [{"text": text * 40} for text in ("", middle, "")],
        )
        tokens.append(first())
    by = "folder"
    tokens = [*tokens, first()]
    tokens = [*tokens, first()]
    assert all(
        one != other for number, one in enumerate(tokens) for other in tokens[:number]
    )
    files = list(tmp_path.glob("tokens/*"))
    for damaged in (b"", b"PK\x03\x04", files[0].read_bytes()[:-30]):
        for path in files:
            path.write_bytes(damaged)
        assert len(first()) == 3


def test_a_dataset_that_is_not_in_the_cache_is_replaced(hugging_face):
    reason = (
        r"c4 is not on this machine and may not be downloaded "
        r"\(ConnectionError: Couldn't reach allenai/c4\)$"
    )
    with pytest.warns(DataWarning, match=f"in place of c4: {reason}"):
        assert get_data("c4").name == "arithmetic"


def test_a_dataset_that_is_here_and_broken_is_said_to_be(hugging_face, monkeypatch):
    monkeypatch.setattr(sys.modules["datasets"], "load_dataset", lambda *_, **__: 1 / 0)
    with pytest.warns(
        DataWarning,
        match=r"food-101 could not be read \(ZeroDivisionError: division by zero\)$",
    ):
        assert get_data("food-101").name == "synthetic-images"
