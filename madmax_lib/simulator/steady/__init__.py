"""The step of many plans at once: the steady state of its pipeline."""
