"""Several shards in a simulated world: see `delayserver.testing.shards.world`."""
