"""The calls that are made for each message (publish, cancel, pull, acknowledge, renew), without a
framework: decoded once, decided with all that came in the same turn, answered together. In the
order to read it in:

paths      which calls these are
publish    publish, batch, heartbeats: from request to answer
cancel     … by id, by key, many
belonging  the shard to which a publish or a cancel of one message belongs
consume    … pull, ack, nack, extend
answers    an answer, before it goes out
protocol   the way in over the wire, past ASGI
heads      … the head of a request, read into a struct
connection … limits on the bytes that a client sends there, and on their time
bodies     bodies that have come whole and wait: bounded bytes
asgi       the way in for any ASGI server
"""
