"""Answers that change nothing: one message, a page of what waits, dead letters."""
