"""A progress bar for work that takes longer than a second, shown where a terminal or a
notebook watches.
"""

import sys
import warnings


def bar(items=None, *, show: bool = True, **options):
    """Bar of tqdm over the items, silent in logs and pipes.

    show: False turns it off. options: those of tqdm, such as total, desc and unit.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tqdm's advice on widgets
        from tqdm.auto import tqdm
    # the standard error of a notebook is no terminal, but shows widgets
    has_viewer = sys.stderr.isatty() or "ipykernel" in sys.modules
    disable = not (show and has_viewer)
    return tqdm(items, delay=1, leave=False, disable=disable, **options)
