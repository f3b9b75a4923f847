"""Other people's software on the client library: one folder for each.

    celery    tasks that are due much later wait in the delay server, not in a worker's memory

Each needs an extra of its own, and nothing of the server.
"""
