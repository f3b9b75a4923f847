"""The audit: a proof over all files that every accepted message was settled exactly once.

    plan ──▶ tasks: an hour, or a part of a large one
               │  each by itself, on Spark or in this process
               ▼
             judge ──▶ facts: counts, what needs a second look, examples, damage
                         │
    merged ◀─────────────┘  added up, names and percentiles, what was moved or retried is followed

In reading order:

    facts       what is left of an hour once it is judged
    plan        a directory at one moment, and the tasks
    judging     from a task to its facts
    row_ids     message ids of rows, also of rows that no server writes
    bodies      whether each payload that waits matches its checksum and its row
    groups      from counts to lines with percentiles
    verdicts    what is kept of an hour, so that it is not judged again
    open_hours  what keeps hours open that are over
    following   messages that went through several schedule rows
    examples    what is wrong, row by row, with names
    audit       all of it: what an audit found
    telling     as text, and as a document for programs
    on_spark    the tasks as one job on Spark

Only the last one knows Spark, so `delayserver check --settled` asks the same question by the same
code where there is no Java.

Cost: about 0.7 µs of a core per message. Threads: the caller's.
"""
