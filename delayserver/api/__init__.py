"""The HTTP API, version 1.

problems   errors as problem documents (RFC 9457)
intake     what a client publishes, from JSON, NDJSON or MessagePack to checked messages
documents  answers that hold messages
openapi    the OpenAPI document
hot        publish and batch: plain ASGI, in front of everything else
protocol   the same two calls without ASGI
connection what a client may send, and how long it may take
routes     everything else, on FastAPI
access     who may call
scopes     which call needs which scope
app        puts them together
"""
