"""From the files to a running state: the reading of a start, and the work of `check` and `repair`.
In reading order:

openers         how each part of a directory is opened
store           the lock, the catalog and the logs of a directory
recover         from whatever a crash left to the state as if it had not happened
definitions     the definitions log as a whole, compared with the catalog
leases_file     leases that a planned stop has left
memory_faults   notes that the process died of a memory fault
check           whether files are sound, and logs and catalog agree
repair          a damaged directory becomes sound, and loses no more than it must
repair_catalog  … the catalog, built again from the logs
repair_hours    … the files by hour
repair_logs     … one file of a log
scrub           reads filed rows again and again, to find damage early
shards          check and repair of several shards, one after the other
standby         files the records that the owner of a shard has logged
replica         a replica, and how it is opened at each of its stages
office_leases   an owner that leaves in order hands its leases to the next
snapshots       files that a checkpoint names, kept as they are
incoming        a replica that is made anew from another one
dropping        the files of a shard are deleted
"""
