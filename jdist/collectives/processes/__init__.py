"""The processes of a run, which start and end together."""
