"""Features beside the core: each is a folder, and registers by one `Feature`.

The core never imports a feature. It is given a tuple of parts, and calls what they register. In the
order to read it in:

part          the protocol of a part: everything that a feature registers
installed     the parts of this server, in one tuple
commands      their modules for the command line
heartbeats    publish unless a client keeps saying that all is well
schedules     publish again and again, each planned time once
sources       topics whose records are published, each once
attempts      how each attempt to deliver a message went, and another one
imports       bulk loads, and archives that let the server delete an hour
"""
