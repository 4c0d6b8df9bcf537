"""Which plan is best? Searches over stages, device groups and degrees, with one stated cost."""
