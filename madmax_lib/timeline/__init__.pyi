from madmax_lib.timeline.accounting import *
from madmax_lib.timeline.side_tables import SPANS as SPANS
from madmax_lib.timeline.timeline import *
