"""Everything that appends a record to the message log, and nothing else does: each call is decided
once, in one order, and answered when its group is durable. In reading order:

sequencer         gives each record its number, in the one order
group             records that are written and synced together, and answered together
groups            a group on its way: open, committing, durable, filed
overlay           changes since the last checkpoint that the catalog does not have yet
new_messages      a message to publish, checked, and as it will be logged
packing           rows of the message log, from columns that were decided together
publishing        one publish, and many: each message gets its seq, and its key is checked
delayed_produce   a publish is answered when the high watermark has passed it
messages          look up, cancel, move
cancels           the same decisions in columns
whereabouts       where a schedule row is that may be still to come
outcomes          the results that sinks report of deliveries
leasing           consumers pull messages, and report the result
retries           records of deliveries that go on later, or are given up
redriving         settled and dead messages are delivered once more
outcome_messages  a message that tells of the outcome of another one
subscribing       a subscription is added, changed or removed
failing           since when a webhook has had nothing but failures
events            one call completes everything that watches a key, exactly once
watches           which messages an event completes
defining          definitions under names, each with a state that moves on
imported_keys     keys of an import, until the catalog has them
"""
