"""Predicting a training step: what is computed, how long it takes, in which order, in how much memory."""
