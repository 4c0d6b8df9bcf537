"""Rows that others, or runs, have measured."""
