"""Types of fields in requests and answers, with what the OpenAPI document says of them.

msgspec makes the schema of a call from its struct. What it says of a field beyond its type stands
here; where a field comes in, the code that reads it checks that.

Cost: none. Threads: types.
"""

from typing import Annotated, Final

from msgspec import Meta

DURATION_PATTERN: Final = r"^([0-9]+|(?=.)([0-9]+d)?([0-9]+h)?([0-9]+m)?([0-9]+s)?([0-9]+ms)?)$"
DURATION_HELP: Final = "milliseconds, or text such as 500ms, 30s, 1h30m, 2d (digits alone: ms)"

Duration = Annotated[
    Annotated[int, Meta(extra_json_schema={"minimum": 0})]
    | Annotated[str, Meta(extra_json_schema={"pattern": DURATION_PATTERN})],
    Meta(description=DURATION_HELP, examples=["30s"]),
]
Time = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]
"""RFC 3339 in UTC, with milliseconds."""
OnEventName = Annotated[str, Meta(extra_json_schema={"enum": ["cancel", "fire"]})]
CatchUpName = Annotated[str, Meta(extra_json_schema={"enum": ["none", "last", "all"]})]
OverlapName = Annotated[str, Meta(extra_json_schema={"enum": ["skip", "allow"]})]
MessageState = Annotated[
    str,
    Meta(extra_json_schema={"enum": ["scheduled", "delivering", "delivered", "cancelled", "dead"]}),
]
PendingState = Annotated[str, Meta(extra_json_schema={"enum": ["scheduled", "delivering"]})]
