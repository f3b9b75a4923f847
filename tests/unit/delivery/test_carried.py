"""What a message carries to a broker."""

import msgspec

from delayserver.delivery.carried import filled, headers
from delayserver.records.message import Payload
from tests.unit.fakes import SUBJECT, delivery

KEYED = msgspec.structs.replace(
    delivery(3, attempt=2), payload=Payload(b"", key="{id} ü", headers={"x": "7"})
)


def test_headers_are_in_order() -> None:
    names = [name for name, _ in headers(KEYED)]
    expected = ["delay-id", "delay-subject", "delay-key", "delay-due", "delay-attempt", "x"]
    assert names == expected
    assert dict(headers(KEYED))["delay-attempt"] == "2"
    assert [name for name, _ in headers(delivery(3))] == [*expected[:2], *expected[3:5]]


def test_templates() -> None:
    assert filled("{key}", KEYED) == "{id} ü"
    assert filled("{key}", delivery(3)) is None
    assert filled("a.{key}.{id}", delivery(3)) == "a..m3"
    # What stands in a key is no template.
    assert filled("{subject}/{key}", KEYED) == f"{SUBJECT}/{{id}} ü"
    assert filled("{other}", KEYED) == "{other}"
    assert filled("", KEYED) == ""
