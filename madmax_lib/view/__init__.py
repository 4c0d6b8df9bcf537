"""Pictures, notebooks, reports: everything that draws."""
