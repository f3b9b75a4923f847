"""The data pipeline: everything that looks at millions of messages at once, on Apache Spark.

In reading order:

    session            a Spark session: quiet, in UTC, with a word where Java is missing
    progress           a job, and a bar for its stages
    workers            what Spark's Python workers need not do: collect imports
    calls              what a load and an archive ask the server

    logs/              the files of the three logs as tables and streams (`delaylog`)
    exports/           a data directory at a place that needs no mount
    states/            what became of every message (`delaystate`, `delayhistory`)
    audits/            that every message was settled exactly once (also without Spark)
    topics/            the logs of a cluster as its brokers have them, and a verdict on each hour
    reports/           jobs that read and tell: forecast, lateness
    publish/           tables and streams become messages over HTTP (`delayserver`)
    load/              a table becomes messages: read, staged, adopted
    archive/           retired hours become Parquet, verified, before the server may delete them

The jobs read the files of a data directory, beside the server that owns it, and write nothing
there but what a load stages for the server. It is the only package that knows pyspark; the server
runs without it, and so does an audit in one process.

Cost: 3–6 s to start a session, then close to the rate of the disk. Threads: the caller's; Spark
starts processes of its own.
"""
