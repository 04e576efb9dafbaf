"""Local steps: the synchronizer and the rules that end its rounds."""
