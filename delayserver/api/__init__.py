"""The HTTP API, version 1.

problems   errors as problem documents (RFC 9457)
intake     what a client publishes, from JSON, NDJSON or MessagePack to checked messages
hot        publish and batch: plain ASGI, in front of everything else
routes     everything else, on FastAPI
access     who may call
app        puts them together
"""
