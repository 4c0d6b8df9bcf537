"""Which plans can be laid over a model, a cluster and a batch, and why the others cannot.

`legal` decides it for every part of the workbench by the rules of `rules`; a `Plan`
checks itself by the same rules.
"""

from dataclasses import dataclass

import numpy as np

from madmax_lib.plan.case import Case
from madmax_lib.plan.rules import Rule, rules_of


@dataclass(frozen=True)
class Verdict:
    """The legal plans of a case, and why the others are not."""

    case: Case  # what was judged
    rules: tuple[Rule, ...]  # those that were applied, in order
    first_broken_rule: np.ndarray  # its number in `rules`, of each plan; -1: legal

    @property
    def mask(self) -> np.ndarray:
        """True for legal plans."""
        return self.first_broken_rule < 0

    def words(self) -> np.ndarray:
        """The words of the rule that each plan breaks, empty for a legal one."""
        words = np.full(self.first_broken_rule.shape, "", dtype=object)
        for row in map(tuple, np.argwhere(~self.mask)):
            rule = self.rules[self.first_broken_rule[row]]
            words[row] = rule.words(self.case.plan[row], self.case)
        return words


def legal(case: Case, extra: tuple[Rule, ...] = ()) -> Verdict:
    """Judge all plans of a case: their fields, then the cluster, the model's shape and
    the batch, where they are given.

    extra: rules of the caller, after those of the book.

    >>> from madmax_lib.catalog.tables import model
    >>> from madmax_lib.plan.columns import Plans
    >>> verdict = legal(Case(model("gpt2"), None, Plans(cp=np.array([2, 3]))))
    >>> verdict.mask.tolist(), verdict.words()[1]
    ([True, False], 'cp=3 does not divide 1024 tokens of gpt2')
    """
    # in the order of the book: the first broken rule is the one that is said
    rules = rules_of(case) + extra
    first = np.full(case.plan.shape, -1)
    # a degree of 0 breaks a rule of its own: what it divides by zero does not matter
    with np.errstate(divide="ignore", invalid="ignore"):
        for number, rule in enumerate(rules):
            broken = rule.broken(case.plan, case)
            if np.any(broken):
                first = np.where((first < 0) & broken, number, first)
    return Verdict(case, rules, first)


def could_run(case: Case) -> bool:
    """Whether a plan that is not legal may have run: the rules that it breaks are those
    that a stack gets round by padding or by stages of unequal length.

    >>> from madmax_lib.plan.plan import Plan
    >>> uneven = Case("qwen3-235b-a22b", None, Plan(pp=32, interleave=3))
    >>> bool(legal(uneven).mask), could_run(uneven)
    (False, True)
    """
    rules = (rule for rule in rules_of(case) if not rule.may_pad)
    return not any(np.any(rule.broken(case.plan, case)) for rule in rules)
