"""The logs of a cluster as its brokers have them: read with Structured Streaming, without a mount.

    NAME.log       accepted messages        ─┐  Spark's Kafka source, committed records
    NAME.settled   their outcomes           ─┴─▶ records ─▶ checksum ─▶ columns
    NAME.meta      stamps, number of shards ──▶ the driver, once

In reading order:

    java_client  the settings that brokers want of clients, in the words of Spark's
    source     where the logs are, and a stream of their records
    settled    records of NAME.settled as rows of the dispatch log
    folding    records of NAME.log: which count, and the frames of those
    pieces     both as a task hands them to the driver
    names      the names for the numbers of subjects and subscriptions
    hours      rows of hours, kept on the driver's disk
    verdicts   an hour, judged as an audit judges it
    watch      a verdict on each hour once it is over
    following  all of it as one stream

The bytes are those that replicas file (FORMAT.md), so everything behind a record is the code that
reads a data directory. Damage names topic, partition and offset.
"""
