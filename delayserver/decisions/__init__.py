"""Everything that appends a record to the message log, and nothing else does: each call is decided
once, in one order, and answered when its group is durable."""
