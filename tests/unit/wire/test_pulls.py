"""The limits of what a consumer asks for."""

import pytest

from delayserver.wire.pulls import ExtendBody, NackBody, PullBody
from delayserver.wire.reading import readable_fields


@pytest.mark.parametrize(
    ("form", "data", "pointers"),
    [
        (PullBody, b"{}", []),
        (PullBody, b'{"max":10000,"min_messages":10000,"wait":"1m","lease":"7d","ack":[]}', []),
        (
            PullBody,
            b'{"max":10001,"min_messages":0,"wait":60001,"lease":0,"ack":[1]}',
            ["/max", "/wait", "/min_messages", "/lease", "/ack/0"],
        ),
        (NackBody, b'{"leases":[],"delay":"400d"}', []),
        (NackBody, b'{"leases":["a"],"delay":-1}', ["/delay"]),
        (ExtendBody, b'{"leases":[]}', ["/lease"]),
        (ExtendBody, b'{"leases":[],"lease":"8d"}', ["/lease"]),
    ],
)
def test_limits(form, data, pointers):
    assert [one.pointer for one in readable_fields(data, form)[1]] == pointers
