"""A delayed-message server: publish now, receive on time, once, and lose nothing in a crash.

In reading order:

records       the records and tables: pure values
schedule      from the message log to the wheel
delivery      from the wheel to the subscriber
decisions     everything that appends a record
recovery      from whatever a crash left to a sound start; check and repair
backup        copies of a server's data, and back again
server        the wiring: threads, clock, metrics, and the calls that the API awaits
parts         features that register with the core
queries       answers that change nothing
api           the meaning of each call
shards        whose it is: several shards behind one address
cluster       who owns it: nodes that have replicas of shards
serve         processes: from settings to a server that answers
client        producers and consumers in Python
cli           the command line, and the demo
integrations  other people's software on the client library
pipeline      jobs on Spark, on the same files
examples      small programs
http          one HTTP/1.1 connection, for webhooks and for the client library
security      tokens, signatures, where webhooks may go
timers        timing wheels, purgatory, token buckets; usable on their own
slices        work of any length, between all else that the event loop has to do
wire          the documents that cross the door, each once
clocks        one that people set, and one that measures
times         how times and durations are written
config        all settings, their defaults, and how they relate
log_writer    the thread that writes the log
errors        the errors above the disk, in one tree

The durable part, which knows nothing of delays or HTTP, is the package `storage`.
"""

__version__ = "0.1.0"
