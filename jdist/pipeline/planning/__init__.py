"""Costs of layers, and the search for cuts, machines and tables."""
