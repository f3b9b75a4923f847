"""The data pipeline: everything that looks at millions of messages at once, on Apache Spark.

    session            a Spark session: quiet, in UTC, with a word where Java is missing
    progress           a job, and a bar for its stages
    workers, arrow     what Spark's Python workers need not do: collect imports, import pandas

    source             the logs as tables and streams (`delaylog`)
      logs, columns, filters, options    files cut into pieces, rows as Arrow, what is pushed down
      dispatched                         the subjects of what was delivered
    states             what became of every message, as a table (`delaystate`)
      snapshot, hour_files, settlement   one moment of a directory, one hour of it, the judgement
    history            the same of retired hours, with bodies (`delayhistory`)

    load               a table becomes messages: read, staged, adopted
      staging, adoption  what executors do with its rows, and what the server is asked
    archive            retired hours become Parquet, verified, before the server may delete them
      place              a directory at any path that Hadoop knows
    calls              what a load and an archive ask the server
    publish            tables and streams become messages over HTTP (`delayserver`)
      sending            what executors do with their rows
    mapping            which columns make messages, for both
    audit, forecast    the jobs; with audit_report, forecast_report and page, what they show
      lateness           percentiles from counts
    live               lateness of what is being delivered, from the stream of the dispatch log

The jobs read the files of a data directory, beside the server that owns it, and write nothing
there but what a load stages for the server. It is the only package that knows pyspark; the server
runs without it.

Cost: 3–6 s to start a session, then close to the rate of the disk. Threads: the caller's; Spark
starts processes of its own.
"""
