"""MAD-Max [Hsia et al., ISCA 2024, arXiv 2310.02784]: its model, released and
corrected, and its figures.
"""

from madmax_lib.base.doors import open_room

TYPE_CHECKING = False

if TYPE_CHECKING:
    from madmax_lib.papers.madmax import (
        plots as plots,
        step_plots as step_plots,
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

__all__ = open_room(__name__)
