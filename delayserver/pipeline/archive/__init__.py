"""Settled hours are copied to Parquet, verified, and confirmed.

In reading order:

    archive   the job: what is due, copy, verify, confirm
    place     the directory that it goes to: local, HDFS, an object store
"""
