"""Gradients that are applied late, and their remedies."""
