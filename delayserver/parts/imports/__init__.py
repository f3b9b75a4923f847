"""Imports of bulk loads, and archives of settled hours. In the order to read it in:

part          registers all of this with the core
imports       adopts the staged rows of a bulk load, all or nothing
importer      looks at a staged import before anything is decided
worker        the thread of the importer
staged        the check of staged files
records       archives that were confirmed, and the check of their table
archives      copies that let the server delete an hour
rest          the calls of the API
shard_routes  the shard of each call
"""
