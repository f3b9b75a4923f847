"""Jobs that read and report: forecast, lateness, and the page of an audit.

In reading order:

    forecast          how many messages fall due when, and how much memory each hour will take
    lateness          percentiles from counts in buckets
    names             one number for each name, over all shards
    live              lateness of deliveries as they happen, from the stream of the dispatch log
    forecast_report   the page of a forecast
    audit_report      the page of an audit (`pipeline.audits`)
    page              one HTML page that loads nothing, which both are drawn on
"""
