"""The calling side of HTTP/1.1, which webhooks, the client library and the demo share."""
