"""The data pipeline: everything that looks at millions of messages at once, on Apache Spark.

    session     a Spark session that is quiet, uses this interpreter, and says when Java is missing
    progress    a bar for the stages of a job
    load        a table becomes messages: read, staged, adopted
    staging     what executors do with its rows
    adoption    what the server is asked

The jobs read the files of a data directory, beside the server that owns it, and write nothing
there but what a load stages for the server. It is the only package that knows pyspark; the server
runs without it.

Cost: 3–6 s to start a session, then close to the rate of the disk. Threads: the caller's; Spark
starts processes of its own.
"""
