from madmax_lib.base.intervals import *
from madmax_lib.base.units import *
