"""Copies of what a server has, and back again. In reading order:

shelf         what stands in the directory of backups, and what each says of itself
backing_up    a snapshot is copied there, checked, and counts from then on
shipped_log   the message log behind the backups, copied while it grows
log_shipping  what is durable and new is copied behind the backups
restoring     a backup, or a moment behind it, becomes a data directory

A running server makes backups by `delayserver.server.backups`.
"""
