"""`python -m delayserver` is the command `delayserver`."""

from delayserver.cli import main

if __name__ == "__main__":
    main()
