"""Every call that is not hot, on FastAPI, imported behind the start. In the order to read it in:

app           the application: its parts, its routes, its errors
common        what all routes share: the parts that answer, statuses, types of parameters
authorize     whether the caller has the scope that the call needs
messages      publish, look up, move, cancel; the list of what waits
subscriptions who gets the messages; pull; dead letters
targets       … where a subscription sends them
timers        heartbeats and events
named         definitions under names: conditions, pages, who may change them
schedules     what is published again and again
bulk          imports and archives
backups       consistent copies of what the server has
tokens        what the own token allows, and which there are
operations    health, metrics, stats, forecast
openapi       the document that describes all of them
docs_page     the OpenAPI document for people
console       the server for operators, in a browser
"""
