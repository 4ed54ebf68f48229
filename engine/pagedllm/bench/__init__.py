"""Benchmarks of an engine: what is sent, how it is timed, and what the figures mean."""
