"""Local steps: one round engine and the rules that end its rounds."""
