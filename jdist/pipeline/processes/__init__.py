"""A runtime whose devices are processes of their own."""
