"""Processes: from settings to a server that answers until it is told to stop. In reading order:

process            the wiring of a server
app                what stands before what: access, the hot calls, the others
supervisor         a process for each shard: starts, watches and stops them
shard              the process of one shard, as a supervisor starts it
node               a process of a node for one shard: on standby, and in office, by turns
candidacy          … on standby: until it holds the office
owner              … in office: until another is to have the shard
fixed_owner        … outside of a cluster: from its start to its end
standby            a process on standby, as clients see it
listening          the sockets that clients connect to
acceptor           takes connections from them, never more than there may be
certificates       the certificate of HTTPS, read again when its files change
hangups            SIGHUP: read again what may have changed
logs               the form of what a process logs, and its way out
reporting          what a process tells whoever has started it
uvicorn_interface  what is used of uvicorn and uvicorn does not promise
"""
