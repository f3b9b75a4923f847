"""The data pipeline: everything that looks at millions of messages at once, on Apache Spark.

In reading order:

    session            a Spark session: quiet, in UTC, with a word where Java is missing
    progress           a job, and a bar for its stages
    workers            spares Spark's Python workers the collection of imports
    calls              the requests of a load and of an archive to the server

    logs/              the files of the three logs as tables and streams (`delaylog`)
    exports/           a data directory at a place that needs no mount
    states/            the state of every message (`delaystate`, `delayhistory`)
    audits/            that every message was settled exactly once (also without Spark)
    topics/            the logs of a cluster as its brokers have them, and a verdict on each hour
    reports/           jobs that read and tell: forecast, lateness
    publish/           tables and streams become messages over HTTP (`delayserver`)
    load/              a table becomes messages: read, staged, adopted
    archive/           retired hours become Parquet, verified, before the server may delete them

The jobs read the files of a data directory, beside the server that owns it. They write nothing
there, except that a load stages messages for the server. Only this package knows pyspark. The
server runs without it, and so does an audit in one process.

Cost: 3–6 s to start a session, then close to the rate of the disk. Threads: the caller's; Spark
starts processes of its own.
"""
