"""How do the ranks talk? Collectives, what is known about each call, clocks."""
