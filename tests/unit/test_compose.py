"""docker-compose.yml, as far as it can be judged without Docker: what it sets are settings, what it
names exists, and the default is one server. That containers of it come up is not tried here."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from delayserver.cli.serve import misspelt
from delayserver.config import Settings
from storage.replicated.kafka_settings import ClusterUrl

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docker-compose.yml"
NODES = ("n1", "n2", "n3")
BROKERS = ("kafka1", "kafka2", "kafka3")
OBSERVERS = ("prometheus", "grafana")


@pytest.fixture(scope="module")
def document() -> Any:
    return yaml.safe_load(FILE.read_text())


def settings_of(service: Any) -> Settings:
    """Of a server, with its defaults in the place of variables that nobody has set."""
    variables: dict[str, Any] = {
        name.removeprefix("DELAYSERVER_").lower(): re.sub(r"\$\{\w+:-(.*)\}", r"\1", text)
        for name, text in service["environment"].items()
    }
    return Settings(**variables | {"token": "0123456789abcdef"})


def test_by_default_it_is_one_server(document: Any) -> None:
    profiles = {name: one.get("profiles") for name, one in document["services"].items()}
    of_cluster = {name: ["cluster"] for name in ("create", *NODES, *BROKERS)}
    of_observers = {name: ["observe"] for name in OBSERVERS}
    assert profiles == {"delayserver": None} | of_cluster | of_observers
    assert settings_of(document["services"]["delayserver"]).shards == 1


def test_nodes_are_set_up_alike(document: Any) -> None:
    services = document["services"]
    urls, ports = set(), set()
    for name in NODES:
        variables = services[name]["environment"]
        assert misspelt(variables) == []
        settings = settings_of(services[name])
        assert (settings.node, settings.advertise) == (name, f"http://{name}:8080")
        assert services[name]["volumes"] == [f"{name}:/data"]
        ports.update(services[name]["ports"])
        urls.add(settings.cluster)
    assert len(ports) == 3
    (url,) = urls
    assert url is not None
    assert url == services["create"]["environment"]["DELAYSERVER_CLUSTER"]
    assert ClusterUrl.parse(url).brokers == tuple(f"{one}:9092" for one in BROKERS)


def test_the_cluster_is_made_before_nodes_start(document: Any) -> None:
    services = document["services"]
    assert {*services["create"]["depends_on"]} == {*BROKERS}
    for name in NODES:
        condition = {"condition": "service_completed_successfully"}
        assert services[name]["depends_on"] == {"create": condition}
    assert services["create"]["entrypoint"][:3] == ["delayserver", "cluster", "create"]
    assert "kafka" in (ROOT / "Dockerfile").read_text()


def test_brokers_are_those_of_the_tests(document: Any) -> None:
    """Their version and settings are those that scripts/kafka has."""
    (version,) = re.findall(
        r"<kafka\.version>(.+)</kafka", (ROOT / "scripts/kafka.pom.xml").read_text()
    )
    script = (ROOT / "scripts/kafka").read_text()
    voters = set()
    for number, name in enumerate(BROKERS, 1):
        service = document["services"][name]
        assert service["image"] == f"apache/kafka:{version}"
        variables = service["environment"]
        assert variables["KAFKA_NODE_ID"] == number
        assert variables["KAFKA_ADVERTISED_LISTENERS"] == f"BROKER://{name}:9092"
        for variable, value in variables.items():
            setting = variable.removeprefix("KAFKA_").lower().replace("_", ".")
            if variable.startswith("KAFKA_"):
                assert f"\n{setting}=" in script, setting
            if variable.endswith("_MS"):
                assert f"\n{setting}={value}\n" in script, setting
        voters.add(variables["KAFKA_CONTROLLER_QUORUM_VOTERS"])
    assert voters == {",".join(f"{n}@{name}:9093" for n, name in enumerate(BROKERS, 1))}


def test_every_volume_is_one(document: Any) -> None:
    used = {
        volume.partition(":")[0]
        for service in document["services"].values()
        for volume in service.get("volumes", ())
        if not volume.startswith("./")
    }
    assert used == {*document["volumes"]}


def test_what_is_mounted_is_there_and_named(document: Any) -> None:
    services = document["services"]
    for name in OBSERVERS:
        assert services[name]["secrets"] == ["token"]
        for volume in services[name]["volumes"]:
            source = volume.partition(":")[0]
            assert not source.startswith("./") or (ROOT / source).is_dir(), source
    config = yaml.safe_load((ROOT / "deploy/prometheus/compose.yml").read_text())
    (job,) = config["scrape_configs"]
    assert job["job_name"] == "delayserver"
    assert job["static_configs"] == [{"targets": ["delayserver:8080"]}]
    assert all((ROOT / "deploy/prometheus" / rules).is_file() for rules in config["rule_files"])
    provisioning = ROOT / "deploy/grafana/provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text())[
        "datasources"
    ]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((provisioning / "dashboards/delayserver.yml").read_text())[
        "providers"
    ]
    mounted = f"./deploy/grafana/dashboards:{provider['options']['path']}:ro"
    assert mounted in services["grafana"]["volumes"]


def has_compose() -> bool:
    if shutil.which("docker") is None:
        return False
    asked = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    return asked.returncode == 0


@pytest.mark.skipif(not has_compose(), reason="needs docker compose")
@pytest.mark.parametrize("profile", [(), ("--profile", "cluster"), ("--profile", "observe")])
def test_docker_takes_it(profile: tuple[str, ...]) -> None:
    done = subprocess.run(
        ["docker", "compose", *profile, "config", "--quiet"],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/usr/local/bin", "DELAYSERVER_TOKEN": "0123456789abcdef"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
