"""Bulk load: a table is staged beside the logs, and adopted by one record.

In reading order:

    load       the job: read, stage, adopt, and what it says of rows that cannot be
    source     the table: files, or what Spark reads
    files      which files there are, and what their folders say
    text       the cells of CSV, the fields of JSON
    reading    rows of one schema out of files
    staging    what an executor does with the rows of its task
    note       what was staged under its name, and the lock of its name
    ids        which row of the table has become which message
    adoption   what the server is asked: begin, adopt, watch
"""
