"""Which plan to try next, after each measured trial."""
