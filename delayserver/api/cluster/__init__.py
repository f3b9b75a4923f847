"""Several shards behind one address: who owns what, who is asked, how answers are put together."""
