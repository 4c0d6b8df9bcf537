"""How long is a step in closed form? Seconds by part, for arrays of plans."""
