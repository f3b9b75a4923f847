"""HTTPS, with certificates made here."""

import os
import re
import signal
import socket
import ssl

import httpx
import pytest
import trustme
from typer.testing import CliRunner

from delayserver.cli import make_app
from tests.waiting import wait_until


def client_of(api, context):
    return httpx.Client(
        base_url=api.process.url.replace("http:", "https:"), verify=context, trust_env=False
    )


def wait_ready(client):
    def probe():
        try:
            return client.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False

    wait_until(probe)


def test_publish_and_pull_over_https(make_api, authority, certificate, trusting, tmp_path):
    api = make_api(**certificate)
    api.launch()
    with client_of(api, trusting) as client:
        wait_ready(client)
        assert f"url=https://127.0.0.1:{api.process.port}" in api.log
        definition = {"subject": "tls", "type": "pull"}
        client.put("/v1/subscriptions/tls", json=definition).raise_for_status()
        for _ in range(3):
            assert client.post("/v1/messages", json={"subject": "tls"}).status_code == 201
        pulled = client.post("/v1/subscriptions/tls/pull", json={"wait": "5s"}).json()
        assert pulled["messages"]
        large = [{"subject": "tls", "body": "x" * 1000}] * 2000
        assert client.post("/v1/messages/batch", json=large).json()["count"] == 2000
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    url = api.process.url.replace("http:", "https:")
    runner = CliRunner()
    known = runner.invoke(make_app(), ["stats", "--url", url, "--tls-ca", str(tmp_path / "ca.pem")])
    assert known.exit_code == 0, known.output
    assert runner.invoke(make_app(), ["stats", "--url", url]).exit_code == 3
    unreadable = runner.invoke(make_app(), ["stats", "--url", url, "--tls-ca", str(tmp_path)])
    assert unreadable.exit_code == 2
    assert "--tls-ca" in unreadable.output
    # A health check does not ask who made the certificate.
    assert ready_here(environment_of(api, certificate)).exit_code == 0
    assert ready_here({"DELAYSERVER_PORT": str(api.process.port)}).exit_code == 3
    # Somebody who does not trust it, and somebody who does not speak TLS.
    stranger = client_of(api, ssl.create_default_context())
    with stranger, pytest.raises(httpx.ConnectError, match="certificate"):
        stranger.get("/readyz")
    with pytest.raises(httpx.TransportError):
        api.get("/readyz")
    assert api.process.stop() == 0


def environment_of(api, certificate, **others):
    """The variables that would start this server."""
    settings = {**certificate, "host": "127.0.0.1", "port": api.process.port, **others}
    return {f"DELAYSERVER_{name.upper()}": str(value) for name, value in settings.items()}


def ready_here(environment, *arguments):
    """The health check of an image, in the environment of its server."""
    return CliRunner().invoke(
        make_app(["operations"]), ["ready", "--here", *arguments], env=environment
    )


def test_clients_that_must_show_a_certificate(make_api, authority, certificate, trusting, tmp_path):
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    api = make_api(**certificate, tls_client_ca=tmp_path / "ca.pem")
    api.launch()
    known = ssl.create_default_context()
    authority.configure_trust(known)
    authority.issue_cert("client@shop.example").configure_cert(known)
    with client_of(api, known) as client:
        wait_ready(client)
    # A health check shows the server's certificate, or one that it is given.
    environment = environment_of(api, certificate)
    shows = {"tls_client_ca": tmp_path / "ca.pem"}
    assert ready_here(environment_of(api, certificate, **shows)).exit_code == 0
    assert ready_here(environment).exit_code == 3
    pair = ["--client-cert", str(certificate["tls_cert"]), "--client-key"]
    assert ready_here(environment, *pair, str(certificate["tls_key"])).exit_code == 0
    url = api.process.url.replace("http:", "https:")
    asks = ["stats", "--url", url, "--tls-ca", str(tmp_path / "ca.pem")]
    stats = CliRunner().invoke(
        make_app(["operations"]), [*asks, *pair, str(certificate["tls_key"])]
    )
    assert stats.exit_code == 0, stats.output
    assert CliRunner().invoke(make_app(["operations"]), asks).exit_code == 3
    unusable = CliRunner().invoke(
        make_app(["operations"]), [*asks, *pair, str(tmp_path / "ca.pem")]
    )
    assert (unusable.exit_code, "--client-cert" in unusable.output) == (2, True)
    alone = CliRunner().invoke(
        make_app(["operations"]), [*asks, "--client-key", str(certificate["tls_key"])]
    )
    assert (alone.exit_code, "--client-cert" in alone.output) == (2, True)
    with client_of(api, trusting) as stranger, pytest.raises(httpx.TransportError):
        stranger.get("/readyz")
    unknown = ssl.create_default_context()
    authority.configure_trust(unknown)
    trustme.CA().issue_cert("client@shop.example").configure_cert(unknown)
    with client_of(api, unknown) as stranger, pytest.raises(httpx.TransportError):
        stranger.get("/readyz")


@pytest.mark.parametrize("name", ["tls_cert", "tls_key", "tls_client_ca"])
@pytest.mark.parametrize("content", [None, "not PEM"])
def test_a_file_that_is_of_no_use_is_named(make_api, certificate, tmp_path, name, content):
    wrong = tmp_path / "wrong.pem"
    if content is not None:
        wrong.write_text(content)
    api = make_api(**{**certificate, name: wrong})
    api.launch()
    wait_until(lambda: not api.process.is_running)
    assert api.process.stop() == 1
    assert str(wrong) in api.log
    assert "Traceback" not in api.log
    assert not api.data_dir.exists()


# ── a renewal ──────────────────────────────────────────────────────────────────────────────────


def shown(api, context):
    """The certificate that a new connection is shown, which it has verified."""
    with (
        socket.create_connection(("127.0.0.1", api.process.port), 20) as connection,
        context.wrap_socket(connection, server_hostname="127.0.0.1") as secured,
    ):
        return secured.getpeercert()


def test_a_renewed_certificate_is_served_and_a_broken_one_is_not(
    make_api, authority, certificate, trusting
):
    api = make_api(**certificate)
    api.launch()
    with client_of(api, trusting) as client:
        wait_ready(client)
        first = shown(api, trusting)

        def figure(name):
            text = client.get("/metrics").text
            (found,) = re.findall(rf"^delayserver_{name} (\S+)$", text, re.MULTILINE)
            return float(found)

        ends_s = ssl.cert_time_to_seconds(first["notAfter"])
        assert figure("certificate_end_timestamp_seconds") == ends_s
        # The new key is there, and its certificate is not yet.
        other = authority.issue_cert("127.0.0.1")
        other.private_key_pem.write_to_path(str(certificate["tls_key"]))
        os.kill(api.process.pid, signal.SIGHUP)
        wait_until(lambda: figure("certificate_renewals_refused_total") == 1)
        assert "a changed certificate is refused" in api.log
        assert str(certificate["tls_key"]) in api.log
        assert shown(api, trusting) == first
        other.cert_chain_pems[0].write_to_path(str(certificate["tls_cert"]))
        os.kill(api.process.pid, signal.SIGHUP)
        wait_until(lambda: shown(api, trusting) != first)
        assert figure("certificate_renewals_refused_total") == 1
        assert client.get("/readyz").status_code == 200  # on the connection from before
    assert api.process.stop() == 0
