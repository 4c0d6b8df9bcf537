from madmax_lib.base.executors import as_they_end as as_they_end
from madmax_lib.base.fields import *
from madmax_lib.base.intervals import *
from madmax_lib.base.units import *
