"""The wiring: one shard's parts, the threads that move them, and the calls that the API makes. In
reading order:

server          a shard moved by real threads, an event loop and a clock
shard           the parts of one data directory, and the ports between them
settle_queue    settled rows, on their way to the settler
body_reader     the bodies of rows that leave
threads         each runs one part, fed by a queue
filer           … the one that files groups, makes checkpoints, and begins loads
engine          everything that the event loop decides, as one synchronous state machine
calls           all that the API and the queries may ask of a server
consumer_calls  … of them those of consumers: pulls and their leases
subscription_calls  … those that define subscriptions
redrive_calls   … those that have something delivered again
event_calls     … an event, and all that it completes
waits           results of the threads, as futures
futures         callbacks as futures
alarm           rings at its moment, to a tenth of a millisecond
clock_watch     whether somebody has set the clock
loop_turns      how long each turn of the event loop takes
sink_runner     deliveries that leave, and their results
webhook_sink    each webhook is traced, sent and counted
dead_letter_log  a line for each dead letter, or for many
backups         backups are begun, watched, listed, deleted
carried_leases  leases over a planned restart
descriptors     the budget of open files and sockets
gauges          the counts of a server
metrics         … for Prometheus
token_keeper    the tokens of a process, as their file is
telemetry       spans for OpenTelemetry
"""
