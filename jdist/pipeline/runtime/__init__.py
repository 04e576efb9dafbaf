"""Runtimes of a table, and the common parts of their programs."""
