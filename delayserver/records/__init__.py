"""The values that are written: messages, ids, subjects, subscriptions, and the tables of the
catalog. Pure values, and how each is packed and parsed. In reading order:

message        a message as an object: only when it comes in, and when it goes out
message_id     enough to find the message without an index
ids            values that only the server makes, with its secret
crc32c         the checksum in plain Python
subjects       subjects, and the patterns that stand for many of them
subject_index  things under patterns, found by subject
content        whether two messages under one key have the same content
attempts       how each try to deliver a message went
message_state  the state of a message and of its deliveries: the only place that decides it
subscriptions  definitions of the receivers of messages
receivers      which subscriptions get a message
direct         messages that say themselves where they go
named          definitions under names, each with a state
zones          time zones as this machine has them
definitions    the ten tables that no hour file tells of, and their log
understanding  a definition is understood, or not understood and why
nesting        how deep a document may be
tables         the tables of the catalog
horizon        messages that have fallen due so far, also if the clock was set back
kept_leases    the record of leases at a planned stop
sharding       which shard a message belongs to
tracecontext   the headers of a trace
arrow          Arrow arrays from NumPy and Python, and back
"""
