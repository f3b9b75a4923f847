"""The calls that are made for each message (publish, cancel, pull, acknowledge, renew), without a
framework: decoded once, decided with all that came in the same turn, answered together."""
