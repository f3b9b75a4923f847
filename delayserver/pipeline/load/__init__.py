"""Bulk load: a table is staged beside the logs, and adopted by one record.

In reading order:

    load       the job: read, stage, adopt, and report the rows that are rejected
    source     the table: files, or a table that Spark reads
    files      the list of files, and the values in the names of their folders
    text       the cells of CSV, the fields of JSON
    reading    rows of one schema out of files
    staging    the work of an executor on the rows of its task
    note       the record of a staged load, and the lock of its name
    ids        which row of the table has become which message
    adoption   the requests to the server: begin, adopt, watch
"""
