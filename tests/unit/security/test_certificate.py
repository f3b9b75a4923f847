"""When a certificate ends, against a library that reads all of it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme
from cryptography import x509

from delayserver.security.certificate import end_s_of


@pytest.mark.parametrize(
    ("year", "key_type"),
    [
        *((year, trustme.KeyType.ECDSA) for year in (1999, 2027, 2049, 2050, 2150)),
        (2027, trustme.KeyType.RSA),
    ],
)
def test_the_end_of_the_first_certificate(
    tmp_path: Path, year: int, key_type: trustme.KeyType
) -> None:
    end, path = datetime(year, 12, 31, 23, 59, 58, tzinfo=UTC), tmp_path / "chain.pem"
    authority = trustme.CA(key_type=key_type)
    made = authority.issue_cert(
        "a.example", not_before=end - timedelta(days=1), not_after=end, key_type=key_type
    )
    path.write_bytes(b"of a shop\n" + made.cert_chain_pems[0].bytes() + authority.cert_pem.bytes())
    (known, _) = x509.load_pem_x509_certificates(path.read_bytes())
    assert end_s_of(path) == known.not_valid_after_utc.timestamp()


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"no certificate",
        b"-----BEGIN CERTIFICATE-----\n!\n-----END",
        b"-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----",
        b"-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----",
    ],
)
def test_what_is_no_certificate_has_no_end(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "cert.pem"
    path.write_bytes(text)
    assert end_s_of(path) == 0
