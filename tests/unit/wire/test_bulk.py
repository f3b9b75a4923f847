"""The limits of what is asked of imports, archives and backups."""

import pytest

from delayserver.wire.bulk import ArchiveModel, BackupModel, ImportModel, ImportSubjectsModel
from delayserver.wire.reading import readable_fields


@pytest.mark.parametrize(
    ("form", "data", "pointers"),
    [
        (ImportSubjectsModel, b'{"subjects":["a","b c","d\\n"]}', ["/subjects/1", "/subjects/2"]),
        (ImportModel, b'{"manifest":"%b"}' % (b"x" * 4097), ["/manifest"]),
        (BackupModel, b"{}", []),
        (BackupModel, b'{"name":null,"verify":false}', []),
        (BackupModel, b'{"name":"../x","verify":1}', ["/name", "/verify"]),
        (
            ArchiveModel,
            b'{"schedule_bytes":-1,"dispatch_bytes":9223372036854775808,"last_seq":1.5}',
            ["/schedule_bytes", "/dispatch_bytes", "/last_seq", "/count"],
        ),
    ],
)
def test_limits(form, data, pointers):
    assert [one.pointer for one in readable_fields(data, form)[1]] == pointers
