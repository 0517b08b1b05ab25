"""Runs from recipes or Python: one, a comparison or a sweep."""
