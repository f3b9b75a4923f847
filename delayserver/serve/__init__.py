"""Processes: from settings to a server that answers until it is told to stop. In reading order:

process            the wiring of a server
app                the layers of an application: access, the hot calls, the others
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
hangups            SIGHUP: read tokens and certificates again
logs               the form of log lines, and their way out
reporting          lines of a process to the supervisor that has started it
uvicorn_interface  the parts of uvicorn that are used here, and that uvicorn does not promise
"""
