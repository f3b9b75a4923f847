"""Jobs that read and tell: forecast, lateness, and the page of an audit.

In reading order:

    forecast          what falls due when, and how much memory each hour will take
    lateness          percentiles from counts in buckets
    names             one number for each name, over all shards
    live              lateness of what is being delivered, from the stream of the dispatch log
    forecast_report   what the first shows
    audit_report      what an audit (`pipeline.audits`) found
    page              one HTML page that loads nothing, which both are drawn on
"""
