"""Names of collectives, the same in every room, and the bytes that their links carry."""

import numpy as np

# those that links are timed with and steps are priced by
TIMED = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "send_recv",
    "broadcast",
    "gather",
)
# All that the library knows. Where a name contains another (reduce_scatter, reduce) it
# comes first: searches in this order find the longer one.
COLLECTIVES = (
    *TIMED,
    "reduce",
    "scatter",
    "dispatch",
    "combine",
    "barrier",
    "generic",
)
# those that move (n - 1) / n of a message once over the busiest link of n ranks
ONE_WAY = ("all_gather", "reduce_scatter", "all_to_all", "gather")
POINT_TO_POINT = ("send", "recv", "send_recv")  # between two ranks of a group


def bus_factor(collective, group_size):
    """Bytes on the busiest link per byte of message, for a group of n ranks
    (nccl-tests); both numbers or (n,).
    """
    # (n - 1) / n of the message cross a link; an all-reduce is a reduce-scatter and an
    # all-gather: twice that.
    share = (group_size - 1) / group_size
    one_way = np.where(np.isin(collective, ONE_WAY), share, 1.0)
    return np.where(collective == "all_reduce", 2 * share, one_way)
