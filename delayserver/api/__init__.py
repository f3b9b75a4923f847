"""The HTTP API, version 1.

problems   errors as problem documents (RFC 9457)
intake     what a client publishes, from JSON, NDJSON or MessagePack to checked messages
documents  answers that hold messages
openapi    the OpenAPI document
answers    an answer, before it goes out
hot        publish, batch and cancels: plain ASGI, in front of everything else
hot_cancel the cancels among them
protocol   the same calls without ASGI
connection what a client may send, and how long it may take
routes     everything else, on FastAPI
timers     … heartbeats and events
rest       … as one application
access     who may call
scopes     which call needs which scope
authorize  … asked on FastAPI
app        puts them together
"""
