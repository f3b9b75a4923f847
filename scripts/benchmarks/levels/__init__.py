"""What a server does, and whether it reaches the levels it was designed for; see `__main__`."""
