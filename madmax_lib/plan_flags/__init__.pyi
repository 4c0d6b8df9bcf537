from madmax_lib.plan_flags.read import *
from madmax_lib.plan_flags.write import write as write
