"""Logs that are always on: who is late, since when, and what it costs, over hours."""
