"""Gradients of real workers: the server's side, and a worker's."""
