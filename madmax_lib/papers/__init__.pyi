from madmax_lib.papers import (
    madmax as madmax,
    metis as metis,
    studies as studies,
    vtrain as vtrain,
)
