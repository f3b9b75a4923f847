"""The state of each message: the data sources `delaystate` and `delayhistory`.

In reading order:

    snapshot     a directory at one moment: its stamp, its catalog, the rows that are not filed yet
    hour_files   the schedule and the dispatch file of an hour, and the rows not filed yet
    vanished     hours that the server takes away while they are read
    entry_states the states of an entry, and the guarantees that a row can break
    settlement   the state of every message of an hour, from both
    states       those states as a table, by id and by key
    named        the names for the numbers in the logs
    history      the same of retired hours, with bodies
"""
