"""A certificate is read again when it is asked for; one of no use changes nothing."""

from __future__ import annotations

import os
import ssl
from datetime import UTC, datetime
from pathlib import Path

import pytest
import structlog
import trustme

from delayserver.config import Settings
from delayserver.errors import InputError
from delayserver.serve.certificates import Certificates

HOST = "127.0.0.1"
BEGUN, ENDED = (datetime(year, 1, 1, tzinfo=UTC) for year in (2020, 2021))


class Files:
    """The files of a server, and those who trust its authority."""

    def __init__(self, directory: Path) -> None:
        self.authority = trustme.CA()
        self.cert, self.key, self.clients = (
            directory / name for name in ("cert", "key", "clients")
        )
        self.trusting = ssl.create_default_context()
        self.authority.configure_trust(self.trusting)
        self.authority.cert_pem.write_to_path(str(self.clients))
        self.put()

    def put(self, not_after: datetime | None = None) -> None:
        made = self.authority.issue_cert(HOST, not_before=BEGUN, not_after=not_after)
        self.put_cert(made)
        made.private_key_pem.write_to_path(str(self.key))

    def put_cert(self, made: trustme.LeafCert) -> None:
        made.cert_chain_pems[0].write_to_path(str(self.cert))

    def certificates(self, tls_client_ca: Path | None = None) -> Certificates:
        settings = Settings(tls_cert=self.cert, tls_key=self.key, tls_client_ca=tls_client_ca)
        return Certificates(settings)

    def shown_by(self, context: ssl.SSLContext | None) -> str:
        """The serial number of what a new connection is shown, which has been verified."""
        assert context is not None
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = self.trusting.wrap_bio(to_client, to_server, server_hostname=HOST)
        server = context.wrap_bio(to_server, to_client, server_side=True)
        for _ in range(2):
            for side in (client, server):
                try:
                    side.do_handshake()
                except ssl.SSLWantReadError:
                    continue
        found = client.getpeercert()
        assert found is not None
        return str(found["serialNumber"])


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def test_new_connections_get_a_renewed_certificate(files: Files) -> None:
    certificates = files.certificates()
    old = certificates.served
    first = files.shown_by(old)
    files.put()
    assert files.shown_by(certificates.served) == first
    certificates.renew()
    second = files.shown_by(certificates.served)
    assert second != first
    assert files.shown_by(old) == first  # as a connection from before has it
    assert certificates.refused == 0


def test_a_renewal_of_no_use_is_refused_and_named(files: Files) -> None:
    certificates = files.certificates()
    first = files.shown_by(certificates.served)

    def refused() -> str:
        before = certificates.refused
        with structlog.testing.capture_logs() as said:
            certificates.renew()
        assert certificates.refused == before + 1
        assert files.shown_by(certificates.served) == first
        (line,) = said
        assert line["event"] == "a changed certificate is refused, and the old one goes on"
        return str(line["error"])

    key = files.key.read_bytes()
    other = files.authority.issue_cert(HOST)
    files.put_cert(other)
    assert "mismatch" in refused().lower() and str(files.cert) in refused()
    files.cert.write_text("no certificate")
    assert str(files.cert) in refused()
    files.cert.unlink()
    assert "No such file" in refused()
    files.put(ENDED)
    assert "has ended at 2021-01-01T00:00:00.000Z" in refused()
    files.key.write_bytes(key)
    assert "mismatch" in refused().lower()
    files.put()
    certificates.renew()
    assert files.shown_by(certificates.served) != first


def test_a_list_of_client_authorities_of_no_use_takes_nothing_with_it(files: Files) -> None:
    certificates = files.certificates(tls_client_ca=files.clients)
    before = certificates.served
    files.put()
    files.clients.write_text("no authority")
    certificates.renew()
    assert certificates.served is before and certificates.refused == 1
    assert before is not None and before.verify_mode == ssl.CERT_REQUIRED


def test_changed_files_are_noticed_and_read_once(files: Files) -> None:
    certificates = files.certificates()
    before = certificates.served
    certificates.renew_if_changed()
    assert certificates.served is before
    # The key comes first, as most programs write them, and in its place.
    other = files.authority.issue_cert(HOST)
    new = files.key.with_name("new")
    other.private_key_pem.write_to_path(str(new))
    os.replace(new, files.key)
    for _ in range(3):
        certificates.renew_if_changed()
    assert (certificates.served, certificates.refused) == (before, 1)
    files.put_cert(other)
    certificates.renew_if_changed()
    assert certificates.served is not before and certificates.refused == 1


def test_without_tls_there_is_nothing_to_read() -> None:
    certificates = Certificates(Settings())
    certificates.renew()
    certificates.renew_if_changed()
    assert (certificates.served, certificates.end_s, certificates.refused) == (None, 0, 0)


def test_a_node_shows_a_renewed_certificate_to_owners_too(files: Files) -> None:
    settings = Settings(tls_cert=files.cert, tls_key=files.key, tls_client_ca=files.clients)
    certificates = Certificates(settings, is_node=True)
    before = certificates.for_owners
    files.put()
    certificates.renew()
    assert certificates.for_owners is not before
    files.key.unlink()
    with pytest.raises(InputError, match="tls_key"):
        Certificates(settings)
