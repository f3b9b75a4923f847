"""Copies of a server's data, and back again. In reading order:

shelf         the directory of backups, and the manifest of each
backing_up    a snapshot is copied there, checked, and counts from then on
shipped_log   the message log behind the backups, copied while it grows
log_shipping  new and durable records are copied behind the backups
restoring     a backup, or a moment behind it, becomes a data directory

A running server makes backups by `delayserver.server.backups`.
"""
