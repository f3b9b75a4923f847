"""Answers that change nothing. In reading order:

look_up       the state of a message, the pending messages, and how much falls due when
listing       the messages of a subject that wait, a page at a time
dead_letters  messages that no attempt delivered
"""
