"""Fakes that are shipped: files that keep synced and unsynced bytes apart, faults, and a catalog in
memory."""
