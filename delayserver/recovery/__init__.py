"""From the files to a running state: what a start reads, and what `check` and `repair` do."""
