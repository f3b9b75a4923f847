"""The wiring: one shard's parts, the threads that move them, and the calls that the API makes."""
