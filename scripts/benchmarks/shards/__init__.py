"""A server of several shards, beside one shard and beside Redis."""
