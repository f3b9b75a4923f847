"""The attempts to deliver a message: looked up, and made again. In the order to read it in:

part      registers all of this with the core
attempts  how each attempt to deliver a message went
rest      the calls of the API
commands  the commands of the command line
"""
