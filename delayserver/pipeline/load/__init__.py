"""Bulk load: a table is staged beside the logs, and adopted by one record."""
