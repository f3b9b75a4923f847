"""Every call that is not hot, on FastAPI, imported behind the start. In the order to read it in:

app           the application: its parts, its routes, its errors
common        shared by all routes: the parts that answer, statuses, types of parameters
authorize     whether the caller has the scope that the call needs
messages      publish, look up, move, cancel; the list of pending messages
subscriptions who gets the messages; pull; dead letters
targets       … where a subscription sends them
named         common to definitions under names: conditions, pages, the right to change one
backups       consistent copies of the server's data
tokens        the scopes of the own token, and the list of tokens
operations    health, metrics, stats, forecast
openapi       the document that describes all of them
docs_page     the OpenAPI document for people
console       the server for operators, in a browser
"""
