"""Ray as the engine."""
