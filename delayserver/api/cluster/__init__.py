"""Several shards behind one address: who owns what, who is asked, and how answers are put together."""
