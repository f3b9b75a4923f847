"""The checksum without a package is the one with it."""

import google_crc32c
from hypothesis import given
from hypothesis import strategies as st

from delayserver.records.crc32c import crc32c


def test_the_value_that_everybody_knows() -> None:
    assert crc32c(b"123456789") == 0xE3069283


@given(st.binary(max_size=300))
def test_it_is_that_of_the_package(data: bytes) -> None:
    assert crc32c(data) == google_crc32c.value(data)
