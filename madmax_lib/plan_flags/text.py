"""Which keys and values stand in a configuration? Files, texts, logs and command lines
as flat dictionaries.
"""

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from madmax_lib.base.fields import short_repr

__all__ = ["Source", "source_of"]

_FILE = re.compile(r"[^\s{}\[\]]+\.(toml|json|ya?ml|sh|log|txt)")
_SCRIPT = re.compile(
    r"\bscript: ((?:\w+=[\w.+-]+ ?)+)"
)  # what a writer leaves to the training script
_VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^{}]*))?\}|\$(\w+)")
_PROGRAM = re.compile(
    r".*\.py$|-m$|activation.checkpoint"
)  # words of a command line that belong to no flag
_WORDS = {"true": True, "false": False, "null": None, "none": None, "~": None}


class Source:
    """A configuration: its form (dict, json, toml, yaml or flags) and its values by
    key, dotted where they nest.

    duplicates: flags that are given with two values. expanded: a script filled in variables.
    """

    def __init__(self, form: str, values: Mapping, text: str = ""):
        self.form = form
        self.duplicates: dict[str, str] = {}
        self.expanded = "$" in text
        self.values = {str(key): scalar(value) for key, value in _flat(values)}
        for words in _SCRIPT.findall(text):
            self.values |= {
                f"script.{k}": scalar(v)
                for k, _, v in (word.partition("=") for word in words.split())
            }


def source_of(source: str | Path | Mapping | Sequence[str]) -> Source:
    """The configuration that a path, a text, a list of words or a dictionary holds.

    Raises ValueError for a text that is none, FileNotFoundError for no file.
    """
    if isinstance(source, Mapping):
        return Source("dict", source, str(source.get("_comment", "")))
    if not isinstance(source, (str, Path)):
        return _flags(" ".join(map(str, source)))
    text = str(source)
    name = "configuration"
    if isinstance(source, Path) or _FILE.fullmatch(text):
        name = text
        text = Path(source).read_text()
    text = text.rpartition("Task Configuration -------")[
        2
    ]  # in the log of Megatron-Bridge
    at = text.find("Running with configs:")
    if at >= 0 or re.match(r"(\s*(//|#).*\n)*\s*\{", text):
        return Source(
            "json",
            _json(re.sub(r"(?m)^(\[\w+\]:)+", "", text[max(at, 0) :]), name),
            text,
        )
    if re.search(r"(?m)^\[[A-Za-z]", text):
        try:
            return Source("toml", tomllib.loads(text))
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{name}: not TOML ({error})") from None
    return _yaml(text, name)


def _json(text: str, name: str) -> Mapping:
    """The first object of a text, such as a log in which it is followed by other lines;
    without lines of comments.
    """
    text = re.sub(r"(?m)^\s*(//|#).*$", "", text)
    try:
        values = json.JSONDecoder().raw_decode(text[max(text.find("{"), 0) :])[0]
    except ValueError as error:
        raise ValueError(f"{name}: not JSON ({' '.join(str(error).split())})") from None
    return values


def _yaml(text: str, name: str) -> Source:
    """YAML, or a command line or script if it is not a mapping."""
    import yaml

    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        values = error
    if isinstance(values, Mapping):
        return Source("yaml", values, text)
    if text.strip() and not re.search(r"(^|[\s\"'(])--\w", text):
        problem = (
            f"YAML ({' '.join(str(values).split())})"
            if isinstance(values, Exception)
            else "a configuration"
        )
        raise ValueError(f"{name}: not {problem}: {short_repr(text)}")
    return _flags(text)


def _flags(text: str) -> Source:
    """Flags of a command line or a shell script, whose variables are filled in where it
    sets them.
    """
    source = Source("flags", {}, text)
    variables = {}
    for line in re.sub(r"\\\s*\n", " ", text).splitlines():
        line = re.sub(r"(^|\s)#.*", "", line).replace('"', "").replace("'", "")
        line = _VARIABLE.sub(
            lambda m: variables.get(m[1] or m[3], m[0] if m[2] is None else m[2]), line
        )
        if (
            setting := re.match(r"\s*(?:export\s+)?(\w+)=(\S*)\s*$", line)
        ) and "--" not in line:
            variables[setting[1]] = setting[2]
        for name, values in _given(line.split()):
            value = " ".join(values) if values else True
            if str(source.values.get(name, value)) != str(value):
                source.duplicates[name] = f"{source.values[name]} and as {value}"
            source.values[name] = value
    for mode in re.findall(
        r"\bactivation.checkpoint[: ](none|selective|full|memory-budget)\b", text
    ):
        source.values |= {
            "activation_checkpoint.mode": mode,
            "activation_checkpoint.selective_ac_option": "op",
        }
    source.values = {name: scalar(value) for name, value in source.values.items()}
    return source


def _given(words: list[str]) -> list[tuple[str, list[str]]]:
    """Flags with their values; words before the first flag are passed over.

    >>> _given("torchrun --nnodes 2 train.py --bf16 --a.tensor-size=4".split())
    [('nnodes', ['2']), ('bf16', []), ('a.tensor_size', ['4'])]
    """
    given: list[tuple[str, list[str]]] = []
    for word in words:
        word = (
            word[word.find("(--") + 1 :]
            if "(--" in word
            else word
            if "(" in word
            else word.rstrip(")")
        )
        if re.match(r"--\w", word):
            name, _, value = word[2:].partition("=")
            name = name.replace("-", "_") if "." in name else name.replace("_", "-")
            given.append((name, [value] if value else []))
        elif given and word and not _PROGRAM.match(word):
            given[-1][1].append(word)
    return given


def _flat(values: Mapping, prefix: str = ""):
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def scalar(value):
    """A value as YAML 1.2 reads it; a list of words as one text.

    >>> scalar("5e8"), scalar("12"), scalar("null"), scalar(["core_attn", "mlp"])
    (500000000.0, 12, None, 'core_attn mlp')
    """
    if isinstance(value, (list, tuple)) and all(
        isinstance(word, str) for word in value
    ):
        value = " ".join(value)
    if not isinstance(value, str):
        return value
    text = " ".join(value.split())
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if re.fullmatch(r"[+-]?\d+", text):
        return int(text)
    return (
        float(text)
        if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", text, re.IGNORECASE)
        else text
    )
