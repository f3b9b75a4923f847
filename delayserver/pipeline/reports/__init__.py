"""Jobs that read and tell: audit, forecast, lateness."""
