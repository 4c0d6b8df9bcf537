"""What does each key of a configuration mean? The rows of `data/plan_flags.csv`,
applied to the values of a source.

A row: framework, key (between slashes a pattern), means, values, note. means is a field
of `Plan`, or global_batch, sequence or dtype, with the words of `values` for those of
the field (none: a whole number from 1 on); `@key` the key that it is another name of;
`code` where a reader works it out with others; `unknown` refuses what stands in no row
above; empty says nothing about the plan, where the value is one of `values` (if there
are any; after `!` none of them), and is refused with the note otherwise.
"""

import re
from functools import lru_cache

from madmax_lib.base.fields import is_whole, short_repr
from madmax_lib.catalog.tables import table
from madmax_lib.plan_flags.text import Source, scalar

__all__ = ["FRAMEWORKS", "Keys", "framework_named", "is_known", "rows_of"]

FRAMEWORKS = {  # and their other names
    "torchtitan": ("titan",),
    "megatron-lm": ("megatron", "megatron-core", "mcore"),
    "megatron-bridge": ("bridge", "nemo"),
    "deepspeed": (),
    "accelerate": ("fsdp", "fsdp2", "huggingface"),
}


def framework_named(name: str) -> str:
    """A framework by one of its names. Raises ValueError with the list for another."""
    plain = (
        re.sub(r"[ _]", "-", str(name).lower())
        .removesuffix("-compiled")
        .removesuffix("-graph")
    )
    for known, others in FRAMEWORKS.items():
        if plain in (known, *others):
            return known
    raise ValueError(
        f"framework={short_repr(name)} is not one of {', '.join(FRAMEWORKS)}"
    )


@lru_cache(maxsize=8)
def rows_of(framework: str) -> tuple[dict, ...]:
    """Rows of the table for a framework."""
    rows = table("plan_flags")
    return tuple(rows[rows["framework"] == framework].to_dict("records"))


class Keys:
    """The keys of a configuration, of which a reader takes those that it understands.

    harmless: keys that say nothing about the plan. notes: what a plan cannot say and
    what stands elsewhere.
    """

    def __init__(self, framework: str, source: Source):
        self.framework = framework
        self.form = source.form
        self.twice = source.twice
        self.expanded = source.expanded
        self.names = {
            row["key"]: row["means"][1:]
            for row in rows_of(framework)
            if row["means"].startswith("@")
        }
        self.values: dict = {}
        self.given: dict[str, str] = {}  # the name in the file of each key
        self.taken: set[str] = set()
        self.harmless: list[str] = []
        self.notes: list[str] = []
        for key, value in source.values.items():
            self.put(self.names.get(key, key), value, key)

    def put(self, key: str, value, given: str) -> None:
        """Another value; one that is None does not count beside another."""
        if value is None and key in self.values:
            return
        if self.values.get(key) is not None and self.values[key] != value:
            raise ValueError(
                f"{self.given[key]}={self.values[key]} and {given}={value} differ"
            )
        self.values[key] = value
        self.given[key] = given

    def say(self, key: str) -> str:
        """A key with its value, as an error names it."""
        name = self.given.get(key, key)
        return f"{'--' * (self.form == 'flags' or '-' in name)}{name.lstrip('-')}={self.values.get(key)}"

    def get(self, key: str, default=None):
        """The value of a key that is understood, the default if it is not given or
        null.
        """
        self.taken.add(key)
        if key in self.twice:
            raise ValueError(f"--{key} is given twice, as {self.twice[key]}")
        value = self.values.get(key)
        return default if value is None else value

    def on(self, key: str, default: bool = False) -> bool:
        """Whether a flag is set."""
        return self.get(key, default) not in (False, 0)

    def count(self, key: str, default: int = 1, least: int = 1) -> int:
        """A whole number."""
        value = self.get(key, default)
        value = (
            scalar(value.split()[0]) if isinstance(value, str) and value else value
        )  # a program may follow
        if not is_whole(value, -(2**62)):
            raise ValueError(f"{self.say(key)} is not a whole number")
        if value < least:
            raise ValueError(
                f"{self.say(key)} must be a whole number of at least {least}"
            )
        return int(value)

    def number(self, key: str, default: float) -> float:
        """A number."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{self.say(key)} is not a number")
        return value

    def word(self, key: str, words: dict, default=None):
        """What the value of a key, in any case, stands for in `words`."""
        value = str(self.get(key, default)).lower()
        if value not in words:
            name = self.say(key).partition("=")[0]
            raise ValueError(
                f"{name}={value}: a plan knows {', '.join(map(str, words))}"
            )
        return words[value]

    def fields(self) -> dict:
        """Fields of the plan and the run that stand for themselves."""
        found = {}
        for row in rows_of(self.framework):
            means = row["means"]
            if (
                means.isidentifier()
                and means not in ("code", "unknown")
                and self.get(row["key"]) is not None
            ):
                found[means] = self._value(row)
        return found

    def _value(self, row: dict):
        key = row["key"]
        words = dict(pair.split("=") for pair in row["values"].split() if "=" in pair)
        if words:
            return self.word(
                key, {word: scalar(value) for word, value in words.items()}
            )
        if row["values"] == "number":
            return self.number(key, 0.0)
        return (
            self.on(key)
            if row["values"] == "flag"
            else self.count(key, least=0 if row["values"] else 1)
        )

    def refuse_unknown(self) -> None:
        """Raises ValueError for a key that no row knows, where it could change the
        plan.
        """
        for key, value in self.values.items():
            if _row(self.framework, key)["means"] == "unknown" and value not in (
                None,
                False,
                "",
            ):
                raise ValueError(
                    f"{self.say(key)}: not known, and it could change the plan"
                )

    def judge(self) -> None:
        """List the keys that nobody took; raises ValueError for one that changes what a
        plan cannot say.
        """
        self.refuse_unknown()
        for key, value in self.values.items():
            row = _row(self.framework, key)
            if key in self.taken and row["means"]:
                continue
            if (
                row["values"]
                and not row["means"]
                and value is not None
                and not _among(value, row["values"])
            ):
                raise ValueError(f"{self.say(key)}: {row['note']}")
            if key not in self.taken and key in self.given:
                self.harmless.append(self.given[key])
            if row["note"] and not row["values"] and value not in (None, False, 0, ""):
                self.notes.append(f"{self.say(key)}: {row['note']}")


def is_known(framework: str, key: str) -> bool:
    """Whether a row of the table speaks of a key."""
    return _row(framework, key) is not _SILENT


_SILENT = {"means": "", "values": "", "note": ""}


@lru_cache(maxsize=4096)
def _row(framework: str, key: str) -> dict:
    """The first row that fits a key."""
    return next((row for row in rows_of(framework) if _fits(row["key"], key)), _SILENT)


def _fits(pattern: str, key: str) -> bool:
    return (
        bool(re.search(pattern[1:-1], key))
        if pattern.startswith("/")
        else pattern == key
    )


def _among(value, words: str) -> bool:
    known = words.removeprefix("!").split()
    return (str(value).lower() in known) != words.startswith("!")
