"""One delivery over TLS, with the real opener and sink in this process: a certificate of a test is
nothing that a server would trust."""

import asyncio
import ssl
from pathlib import Path

import trustme

from delayserver.delivery.outlet import OutletOpener
from delayserver.delivery.outlets import OutletSink
from delayserver.delivery.sink import Confirmed, Failed, Result
from delayserver.records.subscriptions import Subscription
from delayserver.security.targets import TargetPolicy
from tests.unit.fakes import always, delivery

POLICY = TargetPolicy(("localhost", "127.0.0.0/8", "::1"))


class Certificates:
    """For the name localhost, and for no address."""

    def __init__(self, directory: Path) -> None:
        self.authority = trustme.CA()
        issued = self.authority.issue_cert("localhost")
        self.certificate, self.key = directory / "cert.pem", directory / "key.pem"
        self.trusted = directory / "ca.pem"
        self.certificate.write_bytes(b"".join(one.bytes() for one in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(str(self.key))
        self.authority.cert_pem.write_to_path(str(self.trusted))

    @property
    def context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.trusted))


def deliver(opener: OutletOpener, subscription: Subscription) -> Result:
    told: list[Result] = []

    async def main() -> None:
        sink = OutletSink(opener)
        await sink.deliver(
            subscription, [delivery(1)], always, lambda some, result: told.append(result)
        )
        await sink.close()

    asyncio.run(main())
    (result,) = told
    return result


def is_refused(result: Result) -> bool:
    """Because of the certificate."""
    return isinstance(result, Failed) and "certificate" in result.reason.lower()


def is_confirmed(result: Result) -> bool:
    return isinstance(result, Confirmed)
