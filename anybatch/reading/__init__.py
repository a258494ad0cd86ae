"""Reads a loss: follows the batch axis through its jaxpr, and finds where the examples meet."""
