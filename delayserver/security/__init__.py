"""Who may call, which addresses may be called, and how a webhook is signed. In reading order:

tokens       who may do what, and how much of it a second
signing      signatures of webhooks (Standard Webhooks 1)
targets      where webhooks and messages to brokers may go
broker_urls  the URL of a broker, and nothing else
certificate  when a certificate ends
"""
