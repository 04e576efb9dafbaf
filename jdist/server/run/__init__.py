"""A server's run from mark to mark, on every engine."""
