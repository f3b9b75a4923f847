"""Schedules: messages that are published again and again. In the order to read it in:

part        registers all of this with the core
recurrence  a cron expression on the clock of a time zone, or every so often
records     a schedule and its state, and the checks of their tables
scheduling  publishes again and again, each planned time once
intake      schedules as clients write them
rest        the calls of the API
commands    the commands of the command line
"""
