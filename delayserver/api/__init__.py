"""The HTTP API, version 1: the meaning of each call. In reading order:

access           who may call
scopes           which call needs which scope
hot              the calls that are made for each message, without a framework
intake           messages of a client, from bytes to checked messages
json_pieces      a long array of JSON, decoded some of its items at a time
packed           batches in MessagePack
arrow            batches as a stream of Apache Arrow
conditions       versions of a message: If-Match, ETag
documents        answers that hold messages
problems         errors as problem documents (RFC 9457)
rest             all other calls, on FastAPI, and the OpenAPI document
map_call         GET /v1/cluster, whoever answers
finish           the last of an answer: how long it took, compression
exit             every answer about a shard leaves the process through here
leaving          the exit of answers that go through ASGI
moving           connections of clients on their way to the next server of the process
cluster          former names of modules

Whatever a call asks for, it asks `delayserver.server.calls`.
"""
