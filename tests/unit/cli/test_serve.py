"""serve: every setting is an option, and what is wrong is said."""

import pytest

import delayserver
from delayserver.cli import serve as serve_command
from delayserver.config import Settings


@pytest.fixture
def served(cli, monkeypatch):
    """The settings that a server was started with, one for each start."""
    # The wiring itself is tried by the integration tests.
    wiring = pytest.importorskip("delayserver.api.process")
    found: list[Settings] = []

    def serve(settings: Settings) -> int:
        found.append(settings)
        return 7

    monkeypatch.setattr(wiring, "serve", serve)
    return found


def test_every_setting_is_an_option(cli):
    text = cli.run("serve", "--help").stdout
    for name in Settings.model_fields:
        assert serve_command.flag(name) in text


def test_the_status_is_the_servers(cli, served):
    assert cli.run("serve").exit_code == 7
    assert served == [Settings()]


def test_options_of_every_type(cli, served):
    cli.run(
        *("serve", "--port", "9000", "--data-dir", "/var/lib/x", "--durability", "os"),
        *("--log-json", "--lead-ms", "5m", "--retention-ms", "1000", "--clock-offset-ms", "-5"),
        *("--webhook-targets", "10.0.0.0/8", "--webhook-targets", "example.org"),
    )
    (settings,) = served
    assert settings == Settings(
        port=9000,
        data_dir="/var/lib/x",
        durability="os",
        log_json=True,
        lead_ms=300_000,
        retention_ms=1000,
        clock_offset_ms=-5,
        webhook_targets=("10.0.0.0/8", "example.org"),
    )


def test_flags_before_environment_before_file_before_defaults(cli, served, monkeypatch, tmp_path):
    config = tmp_path / "delayserver.toml"
    config.write_text("port = 1\nsubjects_max = 1\nlog_json = true\nlead_ms = '1m'\n")
    monkeypatch.setenv("DELAYSERVER_PORT", "2")
    monkeypatch.setenv("DELAYSERVER_SUBJECTS_MAX", "2")
    cli.run("serve", "--config", str(config), "--port", "3", "--no-log-json")
    (settings,) = served
    assert (settings.port, settings.subjects_max) == (3, 2)
    assert (settings.log_json, settings.lead_ms) == (False, 60_000)
    assert settings.batch_max_messages == 10_000


def test_the_file_may_come_from_the_environment(cli, served, monkeypatch, tmp_path):
    (tmp_path / "x.toml").write_text("port = 5")
    monkeypatch.setenv("DELAYSERVER_CONFIG", str(tmp_path / "x.toml"))
    cli.run("serve")
    assert served[0].port == 5


def test_wrong_settings_are_named_as_they_were_given(cli, served, monkeypatch, tmp_path):
    config = tmp_path / "delayserver.toml"
    config.write_text("lead_ms = 'soon'\nprot = 1\n")
    monkeypatch.setenv("DELAYSERVER_DURABILITY", "maybe")
    result = cli.run("serve", "--config", str(config), "--port", "99999")
    assert result.exit_code == 2
    lines = result.stderr.splitlines()
    assert len(lines) == 4
    assert any(line.startswith("error: --port: ") and "99999" in line for line in lines)
    assert any(line.startswith("error: DELAYSERVER_DURABILITY: ") for line in lines)
    assert any(line.startswith(f"error: lead_ms in {config}: ") for line in lines)
    assert any(line.startswith(f"error: prot in {config}: ") for line in lines)
    assert not served


def test_a_wrong_token_is_not_shown(cli, served):
    result = cli.run("serve", "--token", "geheim")
    assert result.exit_code == 2
    assert "--token" in result.stderr
    assert "geheim" not in result.stderr


def test_settings_that_do_not_go_together(cli, served):
    result = cli.run("serve", "--tls-cert", "cert.pem")
    assert result.exit_code == 2
    assert "tls_cert and tls_key go together" in result.stderr


def test_a_file_that_cannot_be_read(cli, served):
    result = cli.run("serve", "--config", "/no/such/file.toml")
    assert result.exit_code == 2
    assert "cannot read the configuration file" in result.stderr


def test_version(cli):
    assert cli.run("--version").stdout == f"delayserver {delayserver.__version__}\n"


@pytest.mark.parametrize(
    "name",
    [
        *("serve", "publish", "get", "cancel", "move", "subscribe", "subscriptions"),
        *("pull", "ack", "stats", "check", "repair", "demo"),
    ],
)
def test_every_command_has_help_with_an_example(cli, name):
    result = cli.run(name, "--help")
    assert result.exit_code == 0
    assert f"$ delayserver {name}" in result.stdout
