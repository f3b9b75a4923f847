"""Fakes that are shipped, each with the contract of the real thing: a machine that can lose power
(files), calls that fail as planned (faults), and a catalog in memory (catalog)."""
