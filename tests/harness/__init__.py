"""The harness of the long runs: topology × strikes × traffic, judged by the rules of the ledger.

    ledger      everything that was asked, answered, delivered and struck
    rules       the promises, a function each: they read the ledger when a run is over
    strikes     strikes as values, and the seeded schedule that chooses them
    notes       the ledger, the failures and the counts of one run, which all parts share
    traffic     publishers, consumers and webhooks that fill the ledger
    topology    the interface of the processes that are struck
    run         the rounds, the end, and the judgement
    script      options, progress and tables of the commands

Each run is declared in a few lines of its own, which name its topology, strikes, traffic and rules:

    tests.crash.run    servers, which are killed; brokers beside them; backups
    tests.chaos.run    a cluster; its strikes, stage, nodes, offices and times
    tests.soak.run     a server in bad weather; its child process; traffic and abuse
"""
