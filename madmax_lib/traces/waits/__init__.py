"""What waits for what? Launches, idle gaps, steps, the graph of dependencies."""
