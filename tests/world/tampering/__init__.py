"""Tampering: does an audit notice what somebody altered who knows how to make checksums?

    a seed ──▶ VictimWorld: lives of the real server ──▶ a data directory on a disk
                 │ its ledger                              │ audit: must be clean, and count what
                 └──────── how many were accepted ────────▶│ was accepted
                                                           ▼
                                      an alteration: of a row, a file, the catalog, FORMAT
                                                           │ audit: must not be clean
                                                           ▼
                                      missed ──▶ the smallest world in which it is missed, too

In reading order:

    victims       data directories to tamper with
    scene         a directory that is open for alterations: frames, and what the catalog says
    deliveries    what is altered of the dispatch log
    entries       what is altered of the schedule log
    surroundings  what is altered of message log, catalog, FORMAT and bodies
    runs          one run, and all that can be altered

An alteration picks only what an audit has to notice. What it does not look at stands in
`delayserver.pipeline.audits.telling.UNDOUBTED`, and in docs/spark.md.

    python -m tests.world.tampering --runs 10000 --jobs 2 --seed 0

Cost: some 50 ms per run. Threads: none.
"""
