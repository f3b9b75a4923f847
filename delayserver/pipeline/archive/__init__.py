"""Settled hours are copied to a table of Iceberg (or to plain Parquet), verified, and confirmed.

In reading order:

    job       the hours that are asked for, the calls to the server, and the results
    archive   finds the hours that are due, copies, verifies, confirms
    rows      the columns of a row, and the sum that two sets of rows are compared by
    writing   rows to sorted Parquet files, in tasks
    table     the table: its rows, its new files, and files that no snapshot names
    catalog   its versions, without a service
    compaction  many small files become few
    plain     files without a table
    source    the table as a DataFrame, without Iceberg's own runtime
    place     the directory or store that all of it is in
"""
