"""The step as events on the streams of ranks."""
