"""Names under which reproductions of defects find modules that have moved:

reports  `delayserver.cluster.reports`
"""
