"""Schedules of pipelines as tables: made, read, drawn and checked."""
