"""Which plans can be laid over a model, a cluster and a batch, and why not the others?

`legal` decides it for every part of the workbench by the rules of `rules`; a `Plan`
checks itself by the same rules.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from madmax_lib.plan.case import Case
from madmax_lib.plan.rules import Rule, rules_of

__all__ = ["Verdict", "legal"]


@dataclass(frozen=True)
class Verdict:
    """Which plans of a case are legal, and why the others are not."""

    case: Case  # what was judged
    rules: tuple[Rule, ...]  # those that were applied, in order
    place: np.ndarray  # of the first rule that each plan breaks, -1 for a legal plan

    @property
    def mask(self) -> np.ndarray:
        """True for legal plans."""
        return self.place < 0

    def words(self) -> np.ndarray:
        """What is said of each plan, empty for a legal one."""
        words = np.full(self.place.shape, "", dtype=object)
        for row in map(tuple, np.argwhere(~self.mask)):
            words[row] = self.rules[self.place[row]].words(
                self.case.plan[row], self.case
            )
        return words


def legal(case: Case, further: tuple[Rule, ...] = ()) -> Verdict:
    """Judge all plans of a case: their fields, then the cluster, the model's shape and
    the batch, where they are given.

    further: rules of the caller, after those of the book.

    >>> from madmax_lib.catalog.tables import model
    >>> from madmax_lib.plan.columns import Plans
    >>> verdict = legal(Case(model("gpt2"), None, Plans(cp=np.array([2, 3]))))
    >>> verdict.mask.tolist(), verdict.words()[1]
    ([True, False], 'cp=3 does not divide 1024 tokens of gpt2')
    """
    rules = rules_of(case) + further
    place = np.full(case.plan.shape, -1)
    with np.errstate(divide="ignore", invalid="ignore"):
        for number, rule in enumerate(rules):
            broken = rule.broken(case.plan, case)
            if np.any(broken):
                place = np.where((place < 0) & broken, number, place)
    return Verdict(case, rules, place)
