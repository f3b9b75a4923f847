"""Tasks of Celery as bodies of messages: whatever its serializers take comes out as it went in."""

from datetime import UTC, datetime
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from delayserver.integrations.celery.wire import WireTask

FINITE = st.floats(allow_nan=False, allow_infinity=False)
SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | FINITE | st.text()
VALUES = st.recursive(
    SCALARS,
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(), values, max_size=3),
    max_leaves=10,
)
MOMENTS = st.datetimes(timezones=st.just(UTC), max_value=datetime(2100, 1, 1))  # noqa: DTZ001
HEADERS = st.dictionaries(
    st.text(min_size=1).filter(lambda name: name != "compression"),
    SCALARS | MOMENTS | st.uuids() | st.binary(),
    max_size=4,
)


@settings(deadline=None, max_examples=50)
@given(
    arguments=st.lists(VALUES, max_size=3),
    named=st.dictionaries(st.text(), VALUES, max_size=3),
    headers=HEADERS,
    serializer=st.sampled_from(["json", "pickle", "yaml", None]),
    compression=st.sampled_from([None, "zlib", "bzip2"]),
    expiration=st.none() | st.floats(0, 1e9),
)
def test_what_went_in_comes_out(
    arguments: list[Any],
    named: dict[str, Any],
    headers: dict[str, Any],
    serializer: str | None,
    compression: str | None,
    expiration: float | None,
) -> None:
    body = [arguments, named, {"chain": None}]
    options: dict[str, Any] = {"serializer": serializer, "compression": compression}
    task = WireTask.make(
        body,
        now_ms=1000,
        exchange="",
        routing_key="shop",
        headers=headers,
        expiration=expiration,
        **options,
    )
    again = WireTask.decode(task.encode())
    assert again == task
    assert {name: value for name, value in again.headers.items() if name in headers} == headers
    assert again.content(["json", "pickle", "yaml"]) == body
    left_s = again.expiration_s(1000)
    assert left_s == (None if expiration is None else int(expiration * 1000) / 1000)
