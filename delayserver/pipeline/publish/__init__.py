"""Rows of a DataFrame or of a stream are published over HTTP, exactly once by their keys.

In reading order:

    publish   what Spark asks of a sink, and its options
    mapping   which columns make messages; a bulk load reads its table with it, too
    values    what the values of columns become; of a bulk load, too
    columns   the rows of an Arrow batch, one by one or as a stream
    sending   what an executor does with the rows of its task
"""
