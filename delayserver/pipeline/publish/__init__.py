"""Rows of a DataFrame or of a stream are published over HTTP, exactly once by their keys."""
