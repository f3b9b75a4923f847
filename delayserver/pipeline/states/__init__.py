"""What became of each message: the data sources `delaystate` and `delayhistory`.

In reading order:

    snapshot     a directory at one moment: its stamp, its catalog, what is not filed yet
    hour_files   the schedule and the dispatch file of an hour, and what is not filed yet
    vanished     hours that the server takes away while they are read
    settlement   what became of every message of an hour, from both
    states       that as a table, by id and by key
    named        the names that numbers in the logs stand for
    history      the same of retired hours, with bodies
"""
