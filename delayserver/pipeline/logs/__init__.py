"""The three logs as tables: the data source `delaylog`, row by row as they stand in the files.

In reading order:

    source       what Spark asks of a table and of a stream
    options      what a read may be told
    logs         the files, cut into pieces for the tasks of a job
    selection    what of it is wanted: picks files, frames and rows
    columns      rows as Arrow
    dispatched   the subjects of what was delivered
"""
