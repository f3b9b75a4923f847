"""The three logs as tables: the data source `delaylog`, row by row as they stand in the files.

In reading order:

    source       the table and the stream, as Spark asks for them
    options      the options of a read
    logs         the files, cut into pieces for the tasks of a job
    selection    the selection of a read: picks files, frames and rows
    columns      rows as Arrow
    dispatched   the subjects of delivered messages
"""
