"""Runtimes of a table, and what its programs have in common."""
