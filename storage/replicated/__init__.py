"""A shard's message log where it stands on a replicated log engine.

    envelope    the bytes of a record
    office      who owns the shard, and what counts: a fold over the log, without a clock
    lease       who may deliver, answer and claim now: lengths of time, without a log
    engine      what is needed of the engine that keeps the log
    meta        what the cluster is, and which nodes it has: a fold over a log of its own
    kafka       the engine that is used; with kafka_settings (its URL, its clients) and kafka_topics

The engine does the electing, replicating and ordering. It has to give one totally ordered log to
which several may append, which answers an append with its offset once a quorum has it, whose
offsets have no gaps, and which can say where it ends. (A partition of Kafka without transactions is
one.) All but `kafka` is what a process has to do to live with a log that others may write to.
`storage.testing.replicated` simulates the engine, and nodes that live on it.
"""
