"""Jobs that read and tell: audit, forecast, lateness.

In reading order:

    audit             proves that every accepted message was settled exactly once
    forecast          what falls due when, and how much memory each hour will take
    lateness          percentiles from counts in buckets
    names             one number for each name, over all shards
    live              lateness of what is being delivered, from the stream of the dispatch log
    audit_report, forecast_report    what the first two show
    page              one HTML page that loads nothing, which both are drawn on
"""
