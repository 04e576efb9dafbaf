"""Gradients that are applied late, their remedies and their stability."""
