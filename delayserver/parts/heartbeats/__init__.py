"""Heartbeats, which publish unless a client keeps saying that all is well, and the call for events.
In the order to read it in:

part        registers all of this with the core
records     a heartbeat, and the check of its table
heartbeats  renewals, deadlines, and the message at the end
hot         PUT, for the hot path
rest        the other calls of the API
commands    the commands of the command line
"""
