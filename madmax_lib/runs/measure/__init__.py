"""What do runs and machines cost? Phases, meters, benches."""
