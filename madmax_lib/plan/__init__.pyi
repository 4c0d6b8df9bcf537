from madmax_lib.plan.case import Case as Case
from madmax_lib.plan.columns import Plans as Plans
from madmax_lib.plan.plan import Plan as Plan
