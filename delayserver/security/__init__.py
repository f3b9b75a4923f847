"""The callers and their rights, the addresses we may call, and signatures. In reading order:

tokens       what each caller may do, and how much of it a second
signing      signatures of webhooks (Standard Webhooks 1)
targets      where webhooks and messages to brokers may go
broker_urls  the URL of a broker, and nothing else
certificate  when a certificate ends
"""
