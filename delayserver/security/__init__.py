"""The callers and their rights, the addresses we may call, and signatures. In reading order:

tokens       the rights of each caller, and its rate
signing      signatures of webhooks (Standard Webhooks 1)
targets      where webhooks and messages to brokers may go
broker_urls  the URL of a broker, and nothing else
certificate  when a certificate ends
"""
