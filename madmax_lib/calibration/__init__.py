"""Fitting the step-time model to measured rows, and judging it on rows it has not seen."""
