"""Measuring an engine from outside: rows of tokens per second beside the ceilings of the same minutes."""
