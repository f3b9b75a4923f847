"""Settled hours are copied to Parquet, verified, and confirmed."""
