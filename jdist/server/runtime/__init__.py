"""Drivers of protocols in real time: a server, workers, and an engine."""
