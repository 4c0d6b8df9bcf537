"""The meaning of each key of a configuration: the rows of `data/plan_flags.csv`, applied
to the values of a source.

A row: framework, key (between slashes a pattern), means, values, note. means is a field
of `Plan`, or global_batch, sequence or dtype, with the words of `values` for those of
the field (none: a whole number from 1 on); `@key` the key that it is another name of;
`code` where a reader works it out with others; `unknown` refuses what stands in no row
above; empty says nothing about the plan, where the value is one of `values` (if there
are any; after `!` none of them), and is refused with the note otherwise.
"""

import re
from functools import lru_cache

from madmax_lib.base import is_whole, short_repr
from madmax_lib.catalog import data_file, read_object, table
from madmax_lib.plan_flags.text import Source, scalar

WORDS = read_object(data_file("plan_flags/words.json"))
FRAMEWORKS = WORDS["frameworks"]  # and their other names


def framework_named(name: str) -> str:
    """A framework by one of its names. Raises ValueError with the list for another."""
    plain = re.sub(r"[ _]", "-", str(name).lower())
    plain = re.sub("(-compiled)?(-graph)?$", "", plain)  # ways to run the same software
    for framework, others in FRAMEWORKS.items():
        if plain in (framework, *others):
            return framework
    choices = ", ".join(FRAMEWORKS)
    raise ValueError(f"framework={short_repr(name)} is not one of {choices}")


@lru_cache(maxsize=8)
def rows_of(framework: str) -> tuple[dict, ...]:
    """Rows of the table for a framework."""
    rows = table("plan_flags")
    return tuple(rows[rows["framework"] == framework].to_dict("records"))


class Keys:
    """The keys of a configuration, of which a reader takes those that it understands.

    values: by key, other names of a key resolved. source_names: of each key, the name
    in the file. consumed: keys that a reader asked for. harmless: keys that say nothing
    about the plan. notes: what a plan cannot say and what stands elsewhere.
    """

    def __init__(self, framework: str, source: Source):
        self.framework = framework
        self.form = source.form
        self.duplicates = source.duplicates
        self.expanded = source.expanded
        self.values: dict = {}
        self.source_names: dict[str, str] = {}
        self.consumed: set[str] = set()
        self.harmless: list[str] = []
        self.notes: list[str] = []
        # names before a rename, and names in other sections
        aliases = {
            row["key"]: row["means"][1:]
            for row in rows_of(framework)
            if row["means"].startswith("@")
        }
        for key, value in source.values.items():
            self.set(aliases.get(key, key), value, key)

    def set(self, key: str, value, source_name: str) -> None:
        """Add a value; one that is None does not count beside another. Raises
        ValueError for two that differ.
        """
        # two names of one key may both be there, one of them null
        if value is None and key in self.values:
            return
        before = self.values.get(key)
        if before is not None and before != value:
            first = f"{self.source_names[key]}={before}"
            raise ValueError(f"{first} and {source_name}={value} differ")
        self.values[key] = value
        self.source_names[key] = source_name

    def describe(self, key: str) -> str:
        """A key with its value, as an error names it."""
        name = self.source_names.get(key, key)
        dashes = "--" if self.form == "flags" or "-" in name else ""
        return f"{dashes}{name.lstrip('-')}={self.values.get(key)}"

    def get(self, key: str, default=None):
        """The value of a key that is understood, the default if it is not given or
        null.
        """
        # a key that a reader asked for is not harmless, whatever its value
        self.consumed.add(key)
        if key in self.duplicates:
            raise ValueError(f"--{key} is given twice, as {self.duplicates[key]}")
        value = self.values.get(key)
        return default if value is None else value

    def flag(self, key: str, default: bool = False) -> bool:
        """Whether a flag is set."""
        return self.get(key, default) not in (False, 0)

    def count(self, key: str, default: int = 1, least: int = 1) -> int:
        """A whole number."""
        value = self.get(key, default)
        if isinstance(value, str) and value:
            value = scalar(value.split()[0])  # the program may follow the last flag
        if not is_whole(value, -(2**62)):
            raise ValueError(f"{self.describe(key)} is not a whole number")
        if value < least:
            raise ValueError(
                f"{self.describe(key)} must be a whole number of at least {least}"
            )
        return int(value)

    def number(self, key: str, default: float) -> float:
        """A number."""
        value = self.get(key, default)
        # True is an int in Python
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{self.describe(key)} is not a number")
        return value

    def word(self, key: str, meanings: dict, default=None):
        """The meaning of a key's value, in any case. Raises ValueError for a word that
        has none.
        """
        value = str(self.get(key, default)).lower()
        if value not in meanings:
            name = self.describe(key).partition("=")[0]
            words = ", ".join(map(str, meanings))
            raise ValueError(f"{name}={value}: a plan knows {words}")
        return meanings[value]

    def fields(self) -> dict:
        """Fields of the plan and the run that stand for themselves."""
        fields = {}
        for row in rows_of(self.framework):
            means = row["means"]
            # "@key" is an alias, "" says nothing about the plan
            is_field = means.isidentifier() and means not in ("code", "unknown")
            if is_field and self.get(row["key"]) is not None:
                fields[means] = self._value(row)
        return fields

    def _value(self, row):
        """The value of a row's key, of the kind that its column `values` says."""
        key = row["key"]
        kind = row["values"]
        if "=" in kind:
            pairs = [pair.split("=") for pair in kind.split()]
            return self.word(key, {word: scalar(meaning) for word, meaning in pairs})
        if kind == "number":
            return self.number(key, 0.0)
        if kind == "flag":
            return self.flag(key)
        return self.count(key, least=0 if kind else 1)  # "or 0", or from 1 on

    def refuse_unknown(self) -> None:
        """Raises ValueError for a key that no row knows, where it could change the
        plan.
        """
        for key, value in self.values.items():
            # a key that is off does nothing, known or not
            is_off = value in (None, False, "")
            if not is_off and _row(self.framework, key)["means"] == "unknown":
                raise ValueError(
                    f"{self.describe(key)}: not known, and it could change the plan"
                )

    def check_unused(self) -> None:
        """List the keys that nobody took; raises ValueError for one that changes what a
        plan cannot say.
        """
        self.refuse_unknown()
        for key, value in self.values.items():
            row = _row(self.framework, key)
            is_consumed = key in self.consumed
            if is_consumed and row["means"]:
                continue
            allowed = row["values"]
            # after `!` the value must be none of the words
            is_word = str(value).lower() in allowed.removeprefix("!").split()
            is_judged = allowed and not row["means"] and value is not None
            if is_judged and is_word == allowed.startswith("!"):
                raise ValueError(f"{self.describe(key)}: {row['note']}")
            if not is_consumed and key in self.source_names:
                self.harmless.append(self.source_names[key])
            # a note without values is told, not refused
            if row["note"] and not allowed and value not in (None, False, 0, ""):
                self.notes.append(f"{self.describe(key)}: {row['note']}")


def is_known(framework: str, key: str) -> bool:
    """Whether a row of the table speaks of a key."""
    return _row(framework, key) is not _SILENT


_SILENT = {"means": "", "values": "", "note": ""}  # of a key that no row speaks of


@lru_cache(maxsize=4096)
def _row(framework, key):
    """The first row that fits a key; a pattern stands between slashes."""
    for row in rows_of(framework):
        pattern = row["key"]
        if pattern == key:
            return row
        if pattern.startswith("/") and re.search(pattern[1:-1], key):
            return row
    return _SILENT
