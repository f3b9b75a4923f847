"""Batches over several shards: all or none in each, answered as one.

    body ──▶ Intake ──▶ columns ──▶ all of one shard? ──▶ published there
                                ──▶ else ──▶ a part for each, at the same time ──▶ one answer

A batch is read and checked once, where it came in, as a whole: what is wrong with one of its
messages refuses all. The parts go on as columns. Each is accepted whole or refused whole by its
shard. (Two-phase commits over logs are not worth it: under their keys messages are published once,
however often a batch is repeated. A caller to whom it matters says `atomic=true`, and is refused
before anything is done.) Messages without a key stay here, unless none has one and … they stay.

Cost: 0.6 µs a message more than a server alone for those that stay, 3 µs for those that go.
Threads: belongs to the event loop.
"""
