"""The deployment files: compose, Kubernetes, Prometheus and Grafana name existing settings and metrics. Starts
nothing."""

import dataclasses
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from sluice_server.engine.config import EngineConfig
from sluice_server.services.config import ServiceConfig
from sluice_server.services.process.edge_settings import EDGE, EdgeSettings, variable
from sluice_server.services.ranks.settings import rank_table
from sluice_server.services.telemetry import catalogue
from sluice_server.services.telemetry.catalogue import MetricKind
from tools import dashboards

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy/kubernetes"
VERSION = "1.34"  # of Kubernetes, whose schemas are asked
SETTINGS = {
    f"SLUICE_{field.name.upper()}" for config in (EngineConfig, ServiceConfig) for field in dataclasses.fields(config)
} | {variable(field.name) for field in dataclasses.fields(EdgeSettings)}
OWN = {  # of compose.yaml itself
    "SLUICE_PORT",
    "SLUICE_HTTP_PORT",
    "SLUICE_TEXT_IMAGE",
    "SLUICE_ENGINE_IMAGE",
    "SLUICE_CUDA_IMAGE",
    "SLUICE_ENGINE_MEMORY",
    "SLUICE_ENGINE_CPUS",
}


def load(path: str) -> Any:  # noqa: ANN401 # as YAML has it
    return yaml.safe_load((ROOT / path).read_text())


def rendered(folder: Path) -> list[dict[str, Any]]:
    """The Kubernetes resources of a folder, rendered by kubectl if it is installed."""
    if shutil.which("kubectl"):
        command = ["kubectl", "kustomize", str(folder)]
        text = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        return list(yaml.safe_load_all(text))
    names = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    return [one for name in names for one in yaml.safe_load_all((folder / name).read_text())]


def documents() -> list[dict[str, Any]]:
    """The resources of the ring in one pod."""
    return rendered(KUBERNETES)


def sample_names() -> set[str]:
    """The names under which samples of our metrics can be queried."""
    found = set()
    for metric in catalogue.ALL:
        ends = ("_bucket", "_sum", "_count") if metric.kind is MetricKind.HISTOGRAM else ("",)
        found |= {metric.prometheus + end for end in ends}
    return found


def recorded() -> set[str]:
    return {rule["record"] for group in load("deploy/prometheus/rules.yml")["groups"] for rule in group["rules"]}


def queries() -> Iterator[str]:
    for name in ("rules", "alerts"):
        for group in load(f"deploy/prometheus/{name}.yml")["groups"]:
            yield from (rule["expr"] for rule in group["rules"])
    for panels in dashboards.DASHBOARDS.values():
        yield from (expr for panel in panels for expr, _ in panel.queries)


def test_kubernetes_resources_keep_to_their_schemas() -> None:
    found = documents()
    kinds = {document["kind"] for document in found}
    assert {"Deployment", "Service", "PodDisruptionBudget", "HorizontalPodAutoscaler", "NetworkPolicy"} <= kinds
    for document in found:
        kubernetes_validate.validate(document, VERSION, strict=True)


def test_a_wrong_resource_is_found() -> None:
    (wrong,) = (document for document in documents() if document["kind"] == "PodDisruptionBudget")
    wrong["spec"]["maxUnavailble"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSION, strict=True)


def test_the_pod_is_probed_locked_down_and_scaled_by_its_queue() -> None:
    by_kind = {
        document["kind"]: document["spec"]
        for document in documents()
        if document["kind"] != "ConfigMap" and "spec" in document
    }
    pod = by_kind["Deployment"]["template"]["spec"]
    containers = {container["name"]: container for container in pod["containers"]}
    assert set(containers) == {"gateway", "tokenizer", "engine", "detokenizer", EDGE}
    assert containers["gateway"]["readinessProbe"]["grpc"]["port"] == 50051
    assert containers[EDGE]["readinessProbe"]["httpGet"] == {"path": "/health/ready", "port": "http"}
    assert pod["securityContext"]["runAsNonRoot"] is True
    for container in containers.values():
        assert container["livenessProbe"]["exec"]["command"] == ["sluice", "healthcheck"]
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert set(container["resources"]) == {"requests", "limits"}
        assert {one["name"] for one in container["env"]} <= SETTINGS
    (metric,) = by_kind["HorizontalPodAutoscaler"]["metrics"]
    assert metric["pods"]["metric"]["name"] in sample_names()
    labels = by_kind["Deployment"]["template"].get("metadata", {}).get("labels", {})
    assert by_kind["PodDisruptionBudget"]["selector"]["matchLabels"].items() <= labels.items()
    open_ports = {
        one["port"]: one.get("endPort") for rule in by_kind["NetworkPolicy"]["ingress"] for one in rule["ports"]
    }
    ports = {one["name"]: one["containerPort"] for container in containers.values() for one in container["ports"]}
    metrics = sorted(port for name, port in ports.items() if name.startswith("metrics"))
    assert open_ports == {"grpc": None, "http": None, metrics[0]: metrics[-1]}
    grace_s = ServiceConfig().grace_s
    assert pod["terminationGracePeriodSeconds"] > grace_s


def test_the_pods_of_a_group_are_ranks_that_find_each_other() -> None:
    by_kind = {document["kind"]: document for document in rendered(KUBERNETES / "ranks")}
    group = by_kind.pop("LeaderWorkerSet")  # a resource of another project, whose schema is not among these
    for document in by_kind.values():
        kubernetes_validate.validate(document, VERSION, strict=True)
    template = group["spec"]["leaderWorkerTemplate"]
    literals = yaml.safe_load((KUBERNETES / "ranks/kustomization.yaml").read_text())["configMapGenerator"][0][
        "literals"
    ]
    common = dict(literal.split("=", 1) for literal in literals)
    assert common.keys() <= SETTINGS
    assert template["restartPolicy"] == "None" and template["size"] == int(common["SLUICE_PIPELINE_PARALLEL_SIZE"]) == 2
    names = (f"{group['metadata']['name']}-7", f"{group['metadata']['name']}-7-1")  # as the controller names pods
    for index, (kind, rank) in enumerate((("leader", "engine-0"), ("worker", "worker-0-1"))):
        pod = template[f"{kind}Template"]
        name = {"metadata": {**pod["metadata"], "name": "x"}, "spec": pod["spec"]}
        kubernetes_validate.validate({"apiVersion": "v1", "kind": "Pod", **name}, VERSION, strict=True)
        selector = by_kind["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]
        assert selector.items() <= pod["metadata"]["labels"].items()
        containers = {one["name"]: one for one in pod["spec"]["containers"]}
        own = containers["engine" if kind == "leader" else "worker"]
        given = {one["name"]: one.get("value", "") for one in own["env"]}
        assert (
            given.keys() - {"GROUP"} <= SETTINGS
            and {"name": "keys", "mountPath": "/keys", "readOnly": True} in own["volumeMounts"]
        )
        peers = given["SLUICE_RANK_PEERS"].replace("$(GROUP)", "7")
        config = EngineConfig(pipeline_parallel_size=template["size"])
        table = rank_table(config, ServiceConfig(role=given["SLUICE_ROLE"], rank_peers=peers), rank)
        assert table.rank == index and table.hosts == tuple(f"{one}.{group['metadata']['name']}" for one in names)
        (secret,) = (one["secret"] for one in pod["spec"]["volumes"] if one["name"] == "keys")
        assert [one["key"] for one in secret["items"] if one["key"].endswith("_secret")] == [f"{rank}.key_secret"]
        for container in containers.values():
            assert container["livenessProbe"]["exec"]["command"] == ["sluice", "healthcheck"]
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert set(container["resources"]) == {"requests", "limits"}


def test_the_leader_of_a_group_is_the_pod_of_one_ring_with_ranks() -> None:
    alone = load("deploy/kubernetes/deployment.yaml")["spec"]["template"]["spec"]
    leader = load("deploy/kubernetes/ranks/leaderworkerset.yaml")["spec"]["leaderWorkerTemplate"]["leaderTemplate"][
        "spec"
    ]
    leader["volumes"] = leader["volumes"][:-1]
    for container in leader["containers"]:
        container["envFrom"][0]["configMapRef"]["name"] = "sluice"
        container["env"] = [one for one in container["env"] if one["name"] not in ("GROUP", "SLUICE_RANK_PEERS")]
        container["volumeMounts"] = container["volumeMounts"][:2]
    assert leader == alone


def test_compose_runs_every_role_locked_down_with_settings_that_exist() -> None:
    services = load("compose.yaml")["services"]
    for role in ("gateway", "tokenizer", "engine", "detokenizer"):
        service = services[role]
        assert service["environment"]["SLUICE_ROLE"] == role
        assert service["read_only"] is True and service["user"] == "10001:10001" and service["cap_drop"] == ["ALL"]
        assert service["mem_limit"] and service["cpus"] and service["pids_limit"] and service["healthcheck"]
        assert service["depends_on"]["keys"]["condition"] == "service_completed_successfully"
        assert any(volume.startswith(f"keys-{role}:/keys:ro") for volume in service["volumes"])
    edge = services["edge"]
    assert edge["profiles"] == ["http"] and edge["environment"]["SLUICE_ROLE"] == EDGE and "volumes" not in edge
    assert edge["read_only"] is True and edge["cap_drop"] == ["ALL"] and edge["mem_limit"] and edge["healthcheck"]
    beat = edge["environment"][variable("heartbeat_dir")]
    assert f"SLUICE_HEARTBEAT_DIR={beat}" in (ROOT / "Dockerfile").read_text()  # where its health check looks
    assert services["engine-gpu"]["profiles"] == ["gpu"]
    observed = {name for name, service in services.items() if service.get("profiles") == ["observability"]}
    assert observed == {"otel-collector", "tempo", "prometheus", "grafana"}
    assert all(":" in services[name]["image"] and "latest" not in services[name]["image"] for name in observed)
    used = set(re.findall(r"SLUICE_[A-Z_]+", (ROOT / "compose.yaml").read_text()))
    assert used - OWN <= SETTINGS


def test_images_need_nothing_that_the_package_does_not() -> None:
    named = re.findall(r'^    "([A-Za-z0-9_-]+)[><=]', (ROOT / "pyproject.toml").read_text(), re.M)
    for kind in ("text", "engine"):
        lines = (ROOT / f"deploy/requirements-{kind}.txt").read_text().splitlines()
        assert {line for line in lines if line and line[0] not in "#-"} <= set(named)
    assert "torch" not in (ROOT / "deploy/requirements-text.txt").read_text().splitlines()


def test_rules_and_panels_ask_for_metrics_that_exist() -> None:
    known = sample_names() | recorded() | {"process_resident_memory_bytes", "up"}
    for query in queries():
        asked = set(re.findall(r"\b((?:sluice|gen_ai)[a-z_:0-9]+|process_[a-z_]+|up)\b(?=[\[{)]|\s|$)", query))
        assert asked and asked <= known, query


@pytest.mark.parametrize("name", list(dashboards.DASHBOARDS))
def test_dashboards_are_what_the_table_says(name: str) -> None:
    text = (dashboards.TARGET / f"{name}.json").read_text()
    assert text == dashboards.text_of(name), "run python -m tools.dashboards"
    assert json.loads(text)["panels"]
