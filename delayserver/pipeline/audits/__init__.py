"""The audit: a proof over all files that every accepted message was settled exactly once.

    plan ──▶ tasks: an hour, or a part of a large one
               │  each by itself, on Spark or in this process
               ▼
             judge ──▶ facts: counts, rows that need a second look, examples, damage
                         │
    merged ◀─────────────┘  added up, names and percentiles, moved and retried rows are followed

In reading order:

    facts       the facts that are left of an hour once it is judged
    plan        a directory at one moment, and the tasks
    judging     from a task to its facts
    row_ids     message ids of rows, also of rows that no server writes
    bodies      whether each payload that waits matches its checksum and its row
    groups      from counts to lines with percentiles
    verdicts    the verdict on an hour, kept so that the hour is not judged again
    open_hours  the messages that keep past hours open
    following   messages that went through several schedule rows
    examples    broken rows, one by one, with names
    audit       all of it: the result of an audit
    telling     as text, and as a document for programs
    on_spark    the tasks as one job on Spark

Only the last one knows Spark, so `delayserver check --settled` asks the same question by the same
code where there is no Java.

Cost: about 0.7 µs of a core per message. Threads: the caller's.
"""
