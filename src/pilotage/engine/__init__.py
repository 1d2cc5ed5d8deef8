"""Placeholder line, replaced by the package's own docstring."""
