"""Faults of one line, and what must catch each: `python -m tests.mutants --help`."""
