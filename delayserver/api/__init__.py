"""The HTTP API, version 1.

problems   errors as problem documents (RFC 9457)
intake     what a client publishes, from JSON, NDJSON or MessagePack to checked messages
documents  answers that hold messages
openapi    the OpenAPI document
hot        publish and batch: plain ASGI, in front of everything else
protocol   the same two calls without ASGI
routes     everything else, on FastAPI
access     who may call
app        puts them together
"""
