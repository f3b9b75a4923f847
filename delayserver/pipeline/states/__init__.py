"""What became of each message: the data sources `delaystate` and `delayhistory`."""
