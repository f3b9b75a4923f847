"""Rows of a DataFrame or of a stream are published over HTTP, exactly once by their keys.

In reading order:

    publish   the sink, as Spark asks for it, and its options
    mapping   which columns make messages; a bulk load reads its table with it, too
    values    from the values of columns to those of messages; in a bulk load, too
    columns   the rows of an Arrow batch, one by one or as a stream
    sending   the work of an executor on the rows of its task
"""
