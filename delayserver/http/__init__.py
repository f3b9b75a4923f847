"""The calling side of HTTP/1.1, which webhooks, the client library and the demo share.
In reading order:

connecting  to one of several addresses, within a deadline
connection  one request at a time, one answer to each
stream      … that pass through as they come
"""
