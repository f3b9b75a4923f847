"""Logs, frames and the catalog on disk. `FORMAT.md` describes every byte.

This package knows nothing of delays, HTTP or Spark, and imports nothing of `delayserver`.
"""
