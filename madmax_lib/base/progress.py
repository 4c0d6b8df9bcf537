"""Who watches? A bar for work that takes longer than a second, where a terminal or a
notebook shows it.
"""

import sys
import warnings

__all__ = ["bar"]


def bar(items=None, *, show: bool = True, **options):
    """tqdm over the items, silent in logs and pipes. options: those of tqdm, such as
    total, desc and unit.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tqdm's advice on widgets
        from tqdm.auto import tqdm
    seen = sys.stderr.isatty() or "ipykernel" in sys.modules
    return tqdm(items, delay=1, leave=False, disable=not (show and seen), **options)
