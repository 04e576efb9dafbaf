"""The command that starts a training run in several processes."""
