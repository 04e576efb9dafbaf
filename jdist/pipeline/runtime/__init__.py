"""The programs that run a pipeline's table."""
