"""The report of a trace: one HTML file without a network, with the canvas in it."""
