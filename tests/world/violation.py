"""What every check of the simulation raises. Threads: none."""


class Violation(AssertionError):
    """A promise was broken. The message says which; the seed repeats it."""
