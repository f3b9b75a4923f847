"""What makes a Spark of its own start soon, and answer for a few rows in little time."""

from sessions import QUICK_SETTINGS

QUICK_CONF = [
    word for name, text in QUICK_SETTINGS.items() for word in ("--conf", f"{name}={text}")
]
"""Words of a command of the pipeline."""
QUICK_SQL = {name: text for name, text in QUICK_SETTINGS.items() if name.startswith("spark.sql.")}
"""What a session of a Connect server may set."""
