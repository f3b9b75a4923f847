"""serve: every setting is an option, and what is wrong is said."""

import re

import pytest
import typer
from typer.testing import CliRunner

import delayserver
from delayserver.cli import COMMANDS, make_app, modules_of
from delayserver.cli import serve as serve_command
from delayserver.config import Settings, by_heading


@pytest.fixture
def served(cli, monkeypatch):
    """The settings that a server was started with, one for each start."""
    # The wiring itself is tried by the integration tests.
    wiring = pytest.importorskip("delayserver.serve.process")
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


def test_the_help_shows_ten_groups_and_then_the_advanced_ones(cli):
    text = cli.run("serve", "--help").stdout
    panels = re.findall(r"^╭─ (.+?) ─+╮$", text, re.MULTILINE)
    assert panels == ["Options", *(heading.value for heading in by_heading())]
    is_advanced = [panel.startswith("Advanced: ") for panel in panels]
    assert is_advanced == sorted(is_advanced)
    assert is_advanced.count(False) == 1 + 10
    shown = re.findall(r"^│ --([a-z-]+)", text, re.MULTILINE)
    names = [name for names in by_heading().values() for name in names]
    assert shown == ["config", "help", *(name.replace("_", "-") for name in names)]


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


@pytest.mark.parametrize(
    ("written", "targets"),
    [
        (["--webhook-targets", "example.org, 10.0.0.0/8"], ("example.org", "10.0.0.0/8")),
        (["--webhook-targets", '["example.org"]'], ("example.org",)),
        (
            ["--webhook-targets", "a.example,b.example", "--webhook-targets", "[::1]:80"],
            ("a.example", "b.example", "[::1]:80"),
        ),
    ],
)
def test_a_list_as_people_write_it(cli, served, written, targets):
    result = cli.run("serve", *written)
    assert result.exit_code == 7, result.stderr
    assert served[0].webhook_targets == targets


def test_a_list_in_a_variable(cli, served, monkeypatch):
    monkeypatch.setenv("DELAYSERVER_WEBHOOK_TARGETS", "example.com,10.0.0.0/8")
    cli.run("serve")
    assert served[0].webhook_targets == ("example.com", "10.0.0.0/8")


@pytest.mark.parametrize("target", ["300.1.1.1/99", "*", '["a"'])
def test_a_target_that_cannot_be_read_is_one_line(cli, served, target):
    result = cli.run("serve", "--webhook-targets", target)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: --webhook-targets: ")
    assert not served


def test_a_misspelt_variable_is_told(cli, served, monkeypatch):
    monkeypatch.setenv("DELAYSERVER_PORTT", "1")
    monkeypatch.setenv("DELAYSERVER_URL", "http://127.0.0.1:1")
    result = cli.run("serve")
    assert result.stderr == "warning: DELAYSERVER_PORTT is no setting: is it DELAYSERVER_PORT?\n"
    assert served == [Settings()]


def test_the_modules_of_a_command():
    assert modules_of(["--version"]) == ()
    assert modules_of(["serve", "--port", "1"]) == ("serve",)
    assert modules_of(["-h"]) == modules_of(["no-such"]) == tuple(COMMANDS)
    assert modules_of(["--url", "http://a", "ready"]) == tuple(COMMANDS)


def test_each_module_adds_the_commands_that_are_known_of_it():
    groups = dict.fromkeys(module for module in COMMANDS if module.startswith("pipeline"))
    alone = [[module] for module in COMMANDS if module not in groups]
    for modules in [*alone, list(groups)]:
        app = typer.main.get_command(make_app(modules))
        assert isinstance(app, typer.core.TyperGroup)
        assert set(app.commands) == {name for module in modules for name in COMMANDS[module]}


def test_a_command_line_has_each_command_once_however_many_were_made():
    for _ in range(2):
        (pipeline,) = (one for one in make_app().registered_groups if one.name == "pipeline")
        assert pipeline.typer_instance is not None
        names = [str(command.name) for command in pipeline.typer_instance.registered_commands]
        assert sorted(names) == [
            *("archive", "audit", "export", "forecast", "lateness", "load", "watch")
        ]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(cli, monkeypatch, shell):
    monkeypatch.setenv("_DELAYSERVER_COMPLETE", f"source_{shell}")
    result = CliRunner().invoke(make_app(), [], prog_name="delayserver")
    assert "_DELAYSERVER_COMPLETE=complete_" in result.output
