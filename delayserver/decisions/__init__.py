"""Everything that appends a record to the message log, and nothing else does: each call is decided
once, in one order, and answered when its group is durable.

Read in this order: `sequencer` gives a record its number, `group` holds it, `groups` follows the
group until it is filed, `publishing` is one publish, `messages` looks up, cancels and moves, and
`outcomes` is what comes of deliveries. What else there is uses these.
"""
