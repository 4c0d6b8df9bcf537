"""Row of `estimate` for a plan with offload."""

from collections.abc import Callable

from madmax_lib.base.fields import require_type
from madmax_lib.plan.case import Case
from madmax_lib.plan.rules import enforce, rules_of
from madmax_lib.simulator.memory.states import normalised
from madmax_lib.simulator.offload.offload import best_offload
from madmax_lib.simulator.offload.placement import Policy
from madmax_lib.simulator.rates.parameters import Parameters
from madmax_lib.simulator.steady.step_time import PARTS

__all__ = ["offload_row", "policy_of"]


def policy_of(policy) -> Policy:
    """The policy, the default if None. Raises ValueError for what is none."""
    return require_type("policy", policy, Policy, Policy)


def offload_row(
    case: Case, parameters: Parameters, policy: Policy, row_of: Callable
) -> dict[str, float]:
    """Seconds of one plan by column, with offload_s and offload_share.

    row_of: seconds of a case and parameters by column, as if everything fitted.
    """
    enforce(rules_of(case), case.plan, case)
    case = normalised(case)
    row = row_of(case, parameters)
    factor = row["high_s"] / row["step_s"]
    _, times = best_offload(case, parameters, policy)
    row["optimizer_s"] = float(times.update_s[0])
    row["offload_s"] = float(times.total_s[0]) - row["optimizer_s"]
    row["step_s"] = sum(row[name] for name in (*PARTS, "offload_s"))
    row["low_s"] = row["step_s"] / factor
    row["high_s"] = row["step_s"] * factor
    return row | {"offload_share": float(times.share[0])}
