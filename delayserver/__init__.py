"""A delayed-message server: publish now, receive on time, once, and lose nothing in a crash.

The durable part, which knows nothing of delays or HTTP, is the package `storage`.
"""

__version__ = "0.1.0"
