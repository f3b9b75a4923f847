"""From the message log to the wheel: records are filed into the hour in which they are due, an hour
is loaded before it begins, and its rows wait in slots."""
