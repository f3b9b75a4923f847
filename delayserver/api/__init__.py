"""The HTTP API, version 1. In the order to read it in:

process    from settings to a process that serves until it is told to stop
app        what stands before what: access, the hot calls, the others
access     who may call
scopes     which call needs which scope
intake     what a client publishes, from JSON, NDJSON, MessagePack or Arrow to checked messages
conditions versions of a message: If-Match, ETag
hot        the calls that are made for each message, without a framework
documents  answers that hold messages
problems   errors as problem documents (RFC 9457)
rest       all other calls, on FastAPI, and the OpenAPI document

Whatever a call asks for, it asks `delayserver.server.calls`.
"""
