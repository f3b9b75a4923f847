"""Settled hours are copied to a table of Iceberg (or to plain Parquet), verified, and confirmed.

In reading order:

    archive   the job: what is due, copy, verify, confirm
    rows      what a row is, and the sum that two sets of rows are compared by
    writing   rows to sorted Parquet files, in tasks
    table     the table: what it holds, what is added, what nobody names
    catalog   its versions, without a service
    compaction  many small files become few
    plain     files without a table
    source    the table as a DataFrame, without Iceberg's own runtime
    place     the directory or store that all of it is in
"""
