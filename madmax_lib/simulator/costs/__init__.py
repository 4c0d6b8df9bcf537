"""What one layer costs, and what hides what."""
