"""Where the server is that the settings of this environment start."""

import pytest

from delayserver.cli.here import url_here
from delayserver.config import Settings

TLS = {"tls_cert": "cert.pem", "tls_key": "key.pem"}


@pytest.mark.parametrize(
    ("settings", "url"),
    [
        ({}, "http://127.0.0.1:8080"),
        ({"host": "0.0.0.0", "port": 9000}, "http://127.0.0.1:9000"),
        ({"host": "::"}, "http://[::1]:8080"),
        ({"host": "fd00::7"}, "http://[fd00::7]:8080"),
        ({"host": "10.1.2.3", **TLS}, "https://10.1.2.3:8080"),
        ({"host": "delays.internal"}, "http://delays.internal:8080"),
    ],
)
def test_it_is_at_its_address_or_at_loopback(settings, url):
    assert url_here(Settings(**settings)) == url


@pytest.fixture
def environment(monkeypatch):
    """Sets variables of a server."""

    def set_(**settings):
        for name, value in settings.items():
            monkeypatch.setenv(f"DELAYSERVER_{name}", value)

    return set_


def test_any_free_port_is_none_that_can_be_asked(cli, environment):
    environment(PORT="0")
    done = cli.run("ready", "--here")
    assert done.exit_code == 2
    assert "--url" in done.output


def test_settings_that_are_wrong_are_told_as_a_start_tells_them(cli, environment, tmp_path):
    environment(PORT="many")
    done = cli.run("ready", "--here")
    assert done.exit_code == 2
    assert "DELAYSERVER_PORT" in done.output
    environment(PORT="1")
    done = cli.run("ready", "--here", "--config", str(tmp_path / "missing.toml"))
    assert done.exit_code == 2
    assert "missing.toml" in done.output


def test_the_settings_may_stand_in_a_file(cli, tmp_path):
    (tmp_path / "delayserver.toml").write_text('host = "127.0.0.1"\nport = 1\n')
    done = cli.run("ready", "--here", "--config", str(tmp_path / "delayserver.toml"))
    assert done.exit_code == 3
    assert "http://127.0.0.1:1" in done.output
    assert cli.requests == []


def test_a_certificate_that_cannot_be_shown_is_named(cli, environment, tmp_path):
    missing = str(tmp_path / "cert.pem")
    environment(TLS_CERT=missing, TLS_KEY=missing, TLS_CLIENT_CA=missing)
    done = cli.run("ready", "--here")
    assert done.exit_code == 2
    assert missing in done.output
