from madmax_lib.papers.madmax import (
    plots as plots,
    studies as studies,
)
from madmax_lib.papers.madmax.model import (
    evaluate as evaluate,
    timeline as timeline,
)
from madmax_lib.papers.madmax.rules import MadmaxRules as MadmaxRules
from madmax_lib.papers.madmax.suite import (
    published as published,
    suite as suite,
    systems as systems,
)
