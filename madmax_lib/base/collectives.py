"""Names of collectives, the same in every room."""

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
