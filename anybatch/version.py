"""The version, where every floor can see it."""

__version__ = "0.8.0"
