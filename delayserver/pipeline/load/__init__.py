"""Bulk load: a table is staged beside the logs, and adopted by one record.

In reading order:

    load       the job: read, stage, adopt, and what it says of rows that cannot be
    staging    what an executor does with the rows of its task
    adoption   what the server is asked: begin, adopt, watch
"""
