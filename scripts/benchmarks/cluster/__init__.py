"""What a cluster costs, and how long it takes when something is lost; see `__main__`."""
