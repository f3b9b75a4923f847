"""deploy/helm/delayserver: what Helm makes of it for several sets of values is what Kubernetes
takes, and keeps the promises of the server.

Helm's own packages (helm-python-sdk) lint and render it; kubernetes-validate has the schemas of
Kubernetes. That a cluster of Kubernetes runs it is not tried here."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml

import delayserver
from delayserver.cli.serve import misspelt
from delayserver.config import Settings
from scripts.documents import BEGIN, END, SET_BY_CHART
from storage.replicated.kafka_settings import ClusterUrl
from tests.unit.deploy.test_dockerfile import instructions

ROOT = Path(__file__).parents[3]
CHART = ROOT / "deploy/helm/delayserver"
EXAMPLES = sorted((CHART / "ci").glob("*-values.yaml"))
TOKEN = {"token": "0123456789abcdef"}
CLUSTER = {"cluster": {"url": "kafka://b1:9092,b2:9092/delays", "shards": 4}, "replicas": 3}
OLDEST, NEWEST = "1.29", "1.34"


@pytest.fixture(scope="module")
def chart() -> Iterator[helm_python.Chart]:
    with helm_python.Chart.load(CHART) as chart:
        yield chart


class Made:
    """What Helm makes of some values."""

    def __init__(self, chart: helm_python.Chart, values: dict[str, Any]) -> None:
        chart.validate_schema(values)
        files = chart.render(values, name="delays", namespace="shop")
        self.notes = files.pop("delayserver/templates/NOTES.txt")
        self.all: list[Any] = [
            one for text in files.values() for one in yaml.safe_load_all(text) if one
        ]

    def kinds(self) -> list[str]:
        return sorted(one["kind"] for one in self.all)

    def one(self, kind: str) -> Any:
        (found,) = (one for one in self.all if one["kind"] == kind)
        return found

    @property
    def pod(self) -> Any:
        return self.one("StatefulSet")["spec"]["template"]["spec"]

    @property
    def container(self) -> Any:
        (container,) = self.pod["containers"]
        return container

    def variables(self) -> dict[str, str]:
        """Of the server, with what Kubernetes puts in."""
        text = {one["name"]: one.get("value") for one in self.container["env"]}
        if "DELAYSERVER_NODE" in text:
            text["DELAYSERVER_NODE"] = "delays-delayserver-0"
        text["DELAYSERVER_TOKEN"] = TOKEN["token"]
        return {
            name: str(value).replace("$(DELAYSERVER_NODE)", "delays-delayserver-0")
            for name, value in text.items()
        }

    def settings(self) -> Settings:
        """Those that the server is started with."""
        variables = self.variables()
        assert misspelt(variables) == []
        prefix = "DELAYSERVER_"
        given: dict[str, Any] = {
            name.removeprefix(prefix).lower(): value
            for name, value in variables.items()
            if name.startswith(prefix)
        }
        return Settings(**given)


@pytest.fixture
def make(chart: helm_python.Chart) -> Any:
    def make(**values: Any) -> Made:
        return Made(chart, {**TOKEN, **values})

    return make


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_helm_and_kubernetes_take_each_example(chart: helm_python.Chart, path: Path) -> None:
    values = yaml.safe_load(path.read_text())
    report = helm_python.lint(CHART, values, strict=True)
    errors = [one["error"] for one in report["messages"]]
    assert (report["errors"], errors) == ([], ["icon is recommended"])
    made = Made(chart, values)
    made.settings()
    for document in made.all:
        if document["kind"] != "ServiceMonitor":  # a kind of the Prometheus operator
            for version in (OLDEST, NEWEST):
                kubernetes_validate.validate(document, version, strict=True)


def test_what_kubernetes_does_not_take_is_noticed(make: Any) -> None:
    document = make().one("StatefulSet")
    document["spec"]["template"]["spec"]["containers"][0]["readinessProbe"]["httpPost"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="httpPost"):
        kubernetes_validate.validate(document, NEWEST, strict=True)


def test_there_are_examples_for_all_that_is_optional() -> None:
    assert [path.stem for path in EXAMPLES] == [
        "alone-values",
        "cluster-values",
        "everything-values",
    ]


def test_its_versions_are_those_of_the_server(chart: helm_python.Chart, make: Any) -> None:
    metadata = chart.metadata
    assert metadata["version"] == metadata["appVersion"] == delayserver.__version__
    assert make().container["image"] == f"delayserver:{delayserver.__version__}"


def test_every_setting_can_be_given_and_no_other(chart: helm_python.Chart, make: Any) -> None:
    schema = chart.schema
    assert schema is not None
    takes = set(schema["properties"]["settings"]["properties"])
    assert takes == set(Settings.model_fields) - SET_BY_CHART
    given = {
        "webhook_targets": ["*.shop.svc.cluster.local", "10.0.0.0/8"],
        "unfiled_max_bytes": 1_073_741_824,
        "retention_ms": "7d",
        "archive": True,
        "shards": 2,
    }
    settings = make(settings=given).settings()
    assert settings.webhook_targets == ("*.shop.svc.cluster.local", "10.0.0.0/8")
    assert settings.unfiled_max_bytes == 1_073_741_824
    assert (settings.retention_ms, settings.archive, settings.shards) == (7 * 86_400_000, True, 2)


def test_the_chart_makes_the_settings_that_it_refuses() -> None:
    made = set()
    for path in (CHART / "templates").glob("*"):
        made |= set(re.findall(r"- name: DELAYSERVER_([A-Z_]+)$", path.read_text(), re.MULTILINE))
    assert {name.lower() for name in made} == SET_BY_CHART - {"zone"}


def test_the_settings_in_comments_are_the_defaults(make: Any) -> None:
    text = (CHART / "values.yaml").read_text()
    listed = text.partition(f"# {BEGIN}\n")[2].partition(f"# {END}\n")[0]
    values = yaml.safe_load(listed.replace("#  ", "").replace("\n#\n", "\n"))
    assert set(values) == set(Settings.model_fields) - SET_BY_CHART
    given = {name: value for name, value in values.items() if value is not None}
    defaults, settings = Settings(), make(settings=given).settings()
    for name, value in values.items():
        assert getattr(settings, name) == getattr(defaults, name), name
        assert value is not None or getattr(defaults, name) is None, name


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"token": ""}, "needs a token"),
        ({"existingSecret": "delays"}, "one of both"),
        ({"token": "short"}, "token"),
        ({"replicas": 2}, "two servers cannot share"),
        ({"settings": {"port": 9000}}, "port"),
        ({"settings": {"retention": "7d"}}, "retention"),
        ({"persistence": {"accessMode": "ReadWriteMany"}}, "accessMode"),
        ({"cluster": {"url": "delays"}}, "url"),
        ({"cluster": {"url": "kafka://b1:9092/delays"}}, "cluster.shards"),
        ({**CLUSTER, "settings": {"shards": 2}}, "settings.shards"),
        ({"tls": {"clientCa": True}}, "tls.existingSecret"),
        ({"replicaCount": 3}, "replicaCount"),
    ],
)
def test_what_cannot_be_is_refused(make: Any, values: dict[str, Any], said: str) -> None:
    with pytest.raises(helm_python.HelmError, match=said):
        make(**values)


@pytest.mark.parametrize("values", [{}, CLUSTER], ids=["alone", "cluster"])
def test_two_servers_never_have_one_volume(make: Any, values: dict[str, Any]) -> None:
    made = make(**values)
    spec = made.one("StatefulSet")["spec"]
    # Each pod has a claim of its own, which one pod at a time may use, and which stays.
    (claim,) = spec["volumeClaimTemplates"]
    assert claim["spec"]["accessModes"] == ["ReadWriteOncePod"]
    assert not [volume for volume in made.pod["volumes"] if "persistentVolumeClaim" in volume]
    assert set(spec["persistentVolumeClaimRetentionPolicy"].values()) == {"Retain"}
    assert spec["replicas"] == (3 if values else 1)
    assert made.kinds().count("StatefulSet") == 1
    mounts = {one["mountPath"]: one["name"] for one in made.container["volumeMounts"]}
    assert mounts[made.variables()["DELAYSERVER_DATA_DIR"]] == claim["metadata"]["name"]


@pytest.mark.parametrize("values", [{}, CLUSTER], ids=["alone", "cluster"])
def test_a_pod_may_do_nothing_that_it_need_not(make: Any, values: dict[str, Any]) -> None:
    made = make(**values)
    (user,) = instructions("USER")
    security = made.pod["securityContext"]
    assert f"{security['runAsUser']}:{security['runAsGroup']}" == user
    assert security["runAsNonRoot"] and security["fsGroup"] == security["runAsGroup"]
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert made.pod["automountServiceAccountToken"] is False
    assert made.pod["enableServiceLinks"] is False
    for container in [*made.pod["containers"], *made.pod.get("initContainers", ())]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["limits"]["memory"]


def test_a_token_stands_in_a_secret_and_nowhere_else(make: Any) -> None:
    made = make()
    everything = [one for one in made.all if one["kind"] != "Secret"]
    assert TOKEN["token"] not in json.dumps(everything) + made.notes
    assert made.one("Secret")["metadata"]["name"] == "delays-delayserver"
    made = make(token="", existingSecret="mine", existingSecretKey="bearer")
    assert "Secret" not in made.kinds()
    (token,) = (one for one in made.container["env"] if one["name"] == "DELAYSERVER_TOKEN")
    assert token["valueFrom"]["secretKeyRef"] == {"name": "mine", "key": "bearer"}


def test_a_node_is_advertised_by_the_name_that_its_service_gives_it(make: Any) -> None:
    made = make(**CLUSTER)
    settings = made.settings()
    assert settings.node == "delays-delayserver-0"
    name = "delays-delayserver-0.delays-delayserver-nodes.shop.svc.cluster.local"
    assert settings.advertise == f"http://{name}:8080"
    assert settings.cluster is not None and ClusterUrl.parse(settings.cluster).name == "delays"
    services = [one for one in made.all if one["kind"] == "Service"]
    (nodes,) = (one for one in services if one["spec"].get("clusterIP") == "None")
    assert nodes["metadata"]["name"] == made.one("StatefulSet")["spec"]["serviceName"]
    assert nodes["spec"]["publishNotReadyAddresses"] is True


def test_a_node_is_drained_before_it_is_stopped(make: Any) -> None:
    made = make(**CLUSTER)
    *_, script = made.container["lifecycle"]["preStop"]["exec"]["command"]
    assert script.startswith('delayserver cluster drain "$DELAYSERVER_NODE" --wait 30;')
    # Drained, told to stop, and what is on its way ended.
    drain_s = made.settings().drain_ms / 1000
    assert made.pod["terminationGracePeriodSeconds"] >= 30 + 5 + drain_s
    assert made.one("PodDisruptionBudget")["spec"]["maxUnavailable"] == 1
    alone = make()
    assert "lifecycle" not in alone.container
    assert "PodDisruptionBudget" not in alone.kinds()


def test_nodes_are_replaced_one_after_the_other_each_when_the_last_one_is_ready(make: Any) -> None:
    """Ready: an owner accepts, and a replica that follows is not far behind (`/readyz`)."""
    made = make(**CLUSTER)
    pods = made.one("StatefulSet")["spec"]
    # One at a time unless `rollingUpdate` says otherwise; all of them, since no partition is set.
    assert pods["updateStrategy"] == {"type": "RollingUpdate"}
    assert pods["minReadySeconds"] == 10
    probe = made.container["readinessProbe"]
    assert probe["httpGet"]["path"] == "/readyz"
    # It is asked twice at least before a pod has been ready for so long.
    assert probe["periodSeconds"] * 2 <= pods["minReadySeconds"]


@pytest.mark.parametrize("values", [{}, CLUSTER], ids=["alone", "cluster"])
def test_a_server_that_lives_and_is_not_ready_is_not_started_again(
    make: Any, values: dict[str, Any]
) -> None:
    """A replica that is behind, or a disk without room, is no reason to kill the process."""
    container = make(**values).container
    for probe in ("startupProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] == "/healthz"
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"


def test_the_cluster_is_made_before_a_node_starts(make: Any) -> None:
    (create,) = make(**CLUSTER).pod["initContainers"]
    assert create["command"] == ["delayserver", "cluster", "create"]
    assert {"--shards=4", "--replicas=3", "--durability=fsync"} <= set(create["args"])
    assert create["env"][0]["value"] == CLUSTER["cluster"]["url"]  # type: ignore[index]
    assert "initContainers" not in make().pod


def test_probes_know_tls(make: Any) -> None:
    plain = make().container
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert plain[probe]["httpGet"]["scheme"] == "HTTP"
    made = make(tls={"existingSecret": "delays-tls"})
    assert made.container["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    assert made.settings().tls_cert == Path("/etc/delayserver/tls/tls.crt")
    assert make(tls={"existingSecret": "t"}, **CLUSTER).settings().advertise.startswith("https:")
    # Kubernetes shows no certificate: the server asks itself.
    made = make(tls={"existingSecret": "delays-tls", "clientCa": True})
    assert made.container["readinessProbe"]["exec"]["command"] == ["delayserver", "ready", "--here"]
    assert "httpGet" not in json.dumps(made.container)
    assert made.settings().tls_client_ca == Path("/etc/delayserver/tls/ca.crt")


def test_what_is_optional_is_not_there_unless_it_is_asked_for(make: Any) -> None:
    plain = ["Secret", "Service", "Service", "ServiceAccount", "StatefulSet"]
    assert make().kinds() == plain
    made = make(
        networkPolicy={"enabled": True, "from": [{"namespaceSelector": {}}]},
        serviceMonitor={"enabled": True},
        serviceAccount={"create": False},
    )
    added = {"NetworkPolicy", "ServiceMonitor"}
    assert set(made.kinds()) == set(plain) - {"ServiceAccount"} | added
    assert made.pod["serviceAccountName"] == "default"
    (rule,) = made.one("NetworkPolicy")["spec"]["ingress"]
    assert rule == {"ports": [{"port": "http"}], "from": [{"namespaceSelector": {}}]}
    # Nodes reach each other whoever else may call.
    rules = make(networkPolicy={"enabled": True}, **CLUSTER).one("NetworkPolicy")["spec"]["ingress"]
    labels = make().one("StatefulSet")["spec"]["selector"]["matchLabels"]
    assert rules == [
        {"ports": [{"port": "http"}]},
        {"from": [{"podSelector": {"matchLabels": labels}}]},
    ]


def test_prometheus_asks_each_pod_once(make: Any) -> None:
    made = make(serviceMonitor={"enabled": True}, tls={"existingSecret": "t"})
    spec = made.one("ServiceMonitor")["spec"]
    wanted = spec["selector"]["matchLabels"].items()
    services = [one for one in made.all if one["kind"] == "Service"]
    (found,) = (one for one in services if wanted <= one["metadata"]["labels"].items())
    assert found["spec"]["clusterIP"] == "None"
    (endpoint,) = spec["endpoints"]
    assert endpoint["port"] in {port["name"] for port in found["spec"]["ports"]}
    assert endpoint["scheme"] == "https"
    credentials = endpoint["authorization"]["credentials"]
    assert credentials == {"name": "delays-delayserver", "key": "token"}
