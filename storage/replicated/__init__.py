"""A shard's message log where it stands on a replicated log engine. In reading order:

envelope            the bytes of a record
office              who owns the shard, which records count: a fold over the log, without a clock
lease               who may deliver, answer and claim now: lengths of time, without a log
engine              five calls that are needed of the engine that keeps the log
holder              every record that an owner appends goes through here
log                 the message log, as its owner writes it
own                 … with groups on the owner's disk beside the quorum's memory
reader              which records count, and the frames that they complete
reading             a log from an offset to where it ends now
settled             the settled deliveries of a shard: a set that only grows
transactions        records and rows of settled deliveries, together or not at all
lag                 for how long a replica has lacked records that its log has
onlooker            looks on a shard without a replica
sighting            who seems to own a shard, from a piece of its log
adoption            a log that has lost its end goes on
meta                the cluster and its nodes: a fold over a log of its own
kafka               the engine that is used
kafka_clients       its clients: made, asked, and their errors in words
kafka_settings      its URL, its clients
kafka_topics        the settings that its topics need
kafka_transactions  its transactions

The engine does the electing, replicating and ordering. It has to give one totally ordered log to
which several may append, which answers an append with its offset once a quorum has it, whose
offsets have no gaps, and which can say where it ends. (A partition of Kafka without transactions is
one.) All modules but `kafka` are the part of a process that lets it live with a log that others may
write to. `tests.world.storage.replicated` simulates the engine, and nodes that live on it.
"""
