"""Fakes that are shipped, each with the contract of the real thing: a machine that can lose power
(files), calls that fail as planned (faults), a catalog in memory (catalog), a log engine in memory
(engine), and one with nodes that live on it, driven by a seed (replicated)."""
