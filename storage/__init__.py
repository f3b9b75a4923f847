"""Logs, frames and the catalog on disk. `FORMAT.md` describes every byte.

This package knows nothing of delays, HTTP or Spark, and imports nothing of `delayserver`.
In reading order:

files            the one seam to the files of the operating system
errors           the errors of everything that touches a disk
frame            the unit in which all logs are written, read, checked and repaired
frame_runs       many small frames at once, in columns
rows             the columns of the logs, and the kinds of their rows
notes            details of a settlement, which a frame of the dispatch log holds besides rows
write_ahead_log  the calls of a write-ahead log
message_log      everything that was accepted, in the order of `seq`
hour_log         the schedule log and the dispatch log: a file for each hour or day
buckets          files of the schedule log: hours, and days for entries that are far off
definitions_log  a second copy of all that only the catalog knows
catalog          an index of all that must be found without reading a log; on LMDB
catalog_columns  very many pairs of fixed length as two columns
catalog_file     the file of the catalog, read without LMDB
catalog_pages    … page by page
key_runs         sorted pairs of a key hash and a value, in a file that never changes
tiered_catalog   young keys in the catalog, the others in key runs
directory        who owns the data directory, its format and its secrets
kinds            the kind of a directory, and whether all of it is there
shards           the directory of several shards
staging          schedule rows that another process wrote
swap             many files replaced as one step
frame_rules      the rules that the rows of a sound frame keep
check            every header, row and payload of the logs
kept             a cache, bounded by its bytes
scratch          arrays that may be larger than memory
replicated       the message log on a replicated engine
"""
