"""What this machine can do, measured by short runs."""
