"""Gradients that are applied late, and what makes up for it."""
