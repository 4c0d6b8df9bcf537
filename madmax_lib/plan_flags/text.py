"""Keys and values of a configuration: files, texts, logs and command lines as flat
dictionaries.
"""

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from madmax_lib.base import short_repr

_FILE = re.compile(r"[^\s{}\[\]]+\.(toml|json|ya?ml|sh|log|txt)")
# what a writer leaves to the training script
_SCRIPT = re.compile(r"\bscript: ((?:\w+=[\w.+-]+ ?)+)")
# of a shell: ${NAME}, ${NAME:-default} or $NAME
_VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^{}]*))?\}|\$(\w+)")
_SETTING = re.compile(r"\s*(?:export\s+)?(\w+)=(\S*)\s*$")
# words of a command line that belong to no flag
_PROGRAM = re.compile(r".*\.py$|-m$|activation.checkpoint")
# torchtitan's subcommand
_CHECKPOINT = re.compile(
    r"\bactivation.checkpoint[: ](none|selective|full|memory-budget)\b"
)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
_WORDS = {"true": True, "false": False, "null": None, "none": None, "~": None}


class Source:
    """A configuration: its form (dict, json, toml, yaml or flags) and its values by
    key, dotted where they nest.

    duplicates: flags that are given with two values. expanded: a script filled in variables.
    """

    def __init__(self, form: str, values: Mapping, text=""):
        self.form = form
        self.duplicates: dict[str, str] = {}
        self.expanded = "$" in text
        self.values = {str(key): scalar(value) for key, value in _flat(values)}
        for words in _SCRIPT.findall(text):
            for word in words.split():
                name, _, value = word.partition("=")
                self.values[f"script.{name}"] = scalar(value)


def source_of(source: str | Path | Mapping | Sequence[str]) -> Source:
    """The configuration that a path, a text, a list of words or a dictionary holds.

    Raises ValueError for a text that is none, FileNotFoundError for no file.
    """
    # JSON has no comments: the writer keeps its own under a key
    if isinstance(source, Mapping):
        return Source("dict", source, str(source.get("_comment", "")))
    if not isinstance(source, (str, Path)):
        return _flags(" ".join(map(str, source)))
    text = str(source)
    name = "configuration"
    # a text that looks like a name of a file is one
    if isinstance(source, Path) or _FILE.fullmatch(text):
        name = text
        text = Path(source).read_text()
    # in the log of Megatron-Bridge what follows its headline
    text = text.rpartition("Task Configuration -------")[2]
    # in the log of torchtitan the object after these words
    start = text.find("Running with configs:")
    if start >= 0 or re.match(r"(\s*(//|#).*\n)*\s*\{", text):
        # each line may begin with the rank that logged it
        body = re.sub(r"(?m)^(\[\w+\]:)+", "", text[max(start, 0) :])
        return Source("json", _json(body, name), text)
    if re.search(r"(?m)^\[[A-Za-z]", text):  # the head of a section
        try:
            return Source("toml", tomllib.loads(text))
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{name}: not TOML ({error})") from None
    return _yaml(text, name)


def _json(text, name):
    """The first object of a text, such as a log in which it is followed by other lines;
    without lines of comments.
    """
    text = re.sub(r"(?m)^\s*(//|#).*$", "", text)
    try:
        return json.JSONDecoder().raw_decode(text[max(text.find("{"), 0) :])[0]
    except ValueError as error:
        raise ValueError(f"{name}: not JSON ({' '.join(str(error).split())})") from None


def _yaml(text, name):
    """YAML, or a command line or script if it is not a mapping."""
    import yaml

    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        values = error  # a command line may be no YAML
    if isinstance(values, Mapping):
        return Source("yaml", values, text)
    # a command line has a flag somewhere
    if text.strip() and not re.search(r"(^|[\s\"'(])--\w", text):
        problem = "a configuration"
        if isinstance(values, Exception):
            problem = f"YAML ({' '.join(str(values).split())})"
        raise ValueError(f"{name}: not {problem}: {short_repr(text)}")
    return _flags(text)


def _flags(text):
    """Flags of a command line or a shell script, whose variables are filled in where it
    sets them.
    """
    source = Source("flags", {}, text)
    variables = {}

    def value_of(match):
        """The variable's value, else its default, else its name as it stands."""
        default = match[0] if match[2] is None else match[2]
        return variables.get(match[1] or match[3], default)

    for line in re.sub(r"\\\s*\n", " ", text).splitlines():  # continued lines as one
        line = re.sub(r"(^|\s)#.*", "", line).replace('"', "").replace("'", "")
        line = _VARIABLE.sub(value_of, line)
        setting = _SETTING.match(line)
        if setting and "--" not in line:
            variables[setting[1]] = setting[2]
        for name, words in _flags_of(line.split()):
            value = " ".join(words) if words else True
            before = source.values.get(name, value)
            if str(before) != str(value):
                source.duplicates[name] = f"{before} and as {value}"
            source.values[name] = value
    for mode in _CHECKPOINT.findall(text):
        source.values["activation_checkpoint.mode"] = mode
        source.values["activation_checkpoint.selective_ac_option"] = "op"
    source.values = {name: scalar(value) for name, value in source.values.items()}
    return source


def _flags_of(words):
    """Flags with their values; words before the first flag are passed over.

    >>> _flags_of("torchrun --nnodes 2 train.py --bf16 --a.tensor-size=4".split())
    [('nnodes', ['2']), ('bf16', []), ('a.tensor_size', ['4'])]
    """
    flags = []
    for word in words:
        # an array of a shell: ARGS=(--name value)
        if "(--" in word:
            word = word[word.find("(--") + 1 :]
        elif "(" not in word:
            word = word.rstrip(")")
        if re.match(r"--\w", word):
            name, _, value = word[2:].partition("=")
            # dotted names have underscores, others dashes
            name = name.replace("-", "_") if "." in name else name.replace("_", "-")
            flags.append((name, [value] if value else []))
        elif flags and word and not _PROGRAM.match(word):
            flags[-1][1].append(word)
    return flags


def _flat(values, prefix=""):
    # an empty mapping is a value
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
    if isinstance(value, (list, tuple)) and all(isinstance(w, str) for w in value):
        value = " ".join(value)
    if not isinstance(value, str):
        return value
    text = " ".join(value.split())
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if re.fullmatch(r"[+-]?\d+", text):
        return int(text)
    return float(text) if _NUMBER.fullmatch(text) else text
