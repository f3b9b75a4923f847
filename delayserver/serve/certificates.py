"""The certificate that HTTPS is served with, read again when its files change.

    start ──▶ `Certificates`: the files are read; one of no use is an InputError
    SIGHUP, or changed files ──▶ `renew`: read anew, and only then taken
                                     of use       new connections get it, open ones keep the old one
                                     of no use    the old one goes on, the log and a metric say so

A renewal is read into contexts of its own. Rejected: loading into the context in use, where a new
certificate whose key does not fit, or a new list of client authorities that cannot be read, would
leave half of the old one.

Cost: some ms to read the files, nothing per connection. Threads: `renew` belongs to one thread at a
time, the rest to all.
"""

import os
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import structlog

from delayserver.config import Settings
from delayserver.errors import InputError
from delayserver.security.certificate import end_s_of
from delayserver.times import format_time

log = structlog.get_logger()


class _LoadedFiles(NamedTuple):
    """The outcome of one reading of the files."""

    served: ssl.SSLContext | None
    for_owners: ssl.SSLContext | None
    end_s: int


class Certificates:
    """The certificates that this process shows to clients, and to owners of shards that it asks."""

    def __init__(
        self,
        settings: Settings,
        *,
        is_node: bool = False,
        clock_s: Callable[[], float] = time.time,
    ) -> None:
        """`is_node`: it asks owners of other nodes, too. Raises InputError that names the file
        that is of no use."""
        self._settings = settings
        self._is_node = is_node
        self._clock_s = clock_s
        self._seen = self._fingerprint()
        self._read = self._read_files()
        self.refused = 0
        """Renewals that were of no use."""

    @property
    def served(self) -> ssl.SSLContext | None:
        """For a connection that is accepted now; None: by HTTP."""
        return self._read.served

    @property
    def for_owners(self) -> ssl.SSLContext:
        """For a connection to an owner by HTTPS: the CA to verify it by, and our certificate."""
        assert self._read.for_owners is not None, "only a node asks owners"
        return self._read.for_owners

    @property
    def end_s(self) -> int:
        """When the certificate that is served ends, in s since 1970; 0: there is none."""
        return self._read.end_s

    def renew_if_changed(self) -> None:
        """Read the files if they are not those that were read last."""
        if self._fingerprint() != self._seen:
            self.renew()

    def renew(self) -> None:
        """Read the files again."""
        if self._settings.tls_cert is None:
            return
        self._seen = self._fingerprint()
        try:
            found = self._read_files()
            if found.end_s and found.end_s <= self._clock_s() and found.end_s < self.end_s:
                raise InputError(
                    f"tls_cert {self._settings.tls_cert} has ended at "
                    f"{format_time(found.end_s * 1000)}"
                )
            self._read = found
        except InputError as error:
            self.refused += 1
            log.error("a changed certificate is refused, and the old one goes on", error=str(error))
        else:
            ends_at = format_time(self.end_s * 1000)
            log.info("the certificate was read", file=str(self._settings.tls_cert), ends_at=ends_at)

    def _fingerprint(self) -> list[tuple[int, ...] | None]:
        settings = self._settings
        if settings.tls_cert is None:
            return []
        return list(map(_look_at, (settings.tls_cert, settings.tls_key, settings.tls_client_ca)))

    def _read_files(self) -> _LoadedFiles:
        settings = self._settings
        return _LoadedFiles(
            _served(settings),
            make_owner_tls(settings) if self._is_node else None,
            0 if settings.tls_cert is None else _end_s(settings.tls_cert),
        )


def _look_at(path: Path | None) -> tuple[int, ...] | None:
    """Returns the marks of a file that change when it is written or replaced by another one."""
    if path is None:
        return None
    try:
        found = os.stat(path)
    except OSError as error:
        return (error.errno or 0,)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _end_s(path: Path) -> int:
    try:
        return end_s_of(path)
    except OSError as error:
        raise InputError(f"cannot use tls_cert {path}: {error.strerror or error}") from error


def _served(settings: Settings) -> ssl.SSLContext | None:
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    what = f"tls_cert {settings.tls_cert} with tls_key {settings.tls_key}"
    try:
        # A key that needs a password is refused; nobody is there to type one.
        context.load_cert_chain(settings.tls_cert, settings.tls_key, password="")
        if settings.tls_client_ca is not None:
            what = f"tls_client_ca {settings.tls_client_ca}"
            context.load_verify_locations(settings.tls_client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:
        raise InputError(f"cannot use {what}: {error.strerror or error}") from error
    return context


def make_owner_tls(settings: Settings) -> ssl.SSLContext:
    """The CA that owners by HTTPS are verified by, and our certificate. Raises InputError."""
    context = ssl.create_default_context()
    if settings.tls_client_ca is not None:
        assert settings.tls_cert is not None, "a relation of the settings"
        try:
            context.load_verify_locations(settings.tls_client_ca)
            context.load_cert_chain(settings.tls_cert, settings.tls_key, password="")
        except OSError as error:
            raise InputError(
                f"cannot verify owners with tls_client_ca {settings.tls_client_ca} and tls_cert "
                f"{settings.tls_cert}: {error.strerror or error}"
            ) from error
    return context
