"""What was left behind by jobs that failed: memory snapshots, flight recorders."""
