"""A progress bar for work that takes longer than a second, shown where a terminal or a
notebook watches.
"""

import sys
import warnings


def bar(items=None, *, show: bool = True, **options):
    """Bar of tqdm over the items, silent in logs and pipes.

    show: False turns it off. options: those of tqdm, such as total, desc and unit.
    """
    # the standard error of a notebook is no terminal, but shows widgets
    in_notebook = "ipykernel" in sys.modules
    from tqdm import tqdm

    if in_notebook:
        with warnings.catch_warnings(action="ignore"):  # tqdm's advice on widgets
            from tqdm.auto import tqdm  # takes asyncio along
    disable = not (show and (in_notebook or sys.stderr.isatty()))
    return tqdm(items, delay=1, leave=False, disable=disable, **options)
