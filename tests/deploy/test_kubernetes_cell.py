"""The cell over several pods: schemas, and that peers, keys, services, policies and budgets name the same processes."""

import functools
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from sluice_server.services.config import parse_peers
from sluice_server.services.messages.processes import Role
from sluice_server.services.process.engine_table import parse_table
from sluice_server.services.ring.keys import load_keys, make_keys
from sluice_server.services.ring.peers import NEXT
from tests.deploy.test_deploy import KUBERNETES, SETTINGS, VERSION, load, recorded, rendered, sample_names

CELL = KUBERNETES / "cell"
ROLES = (Role.GATEWAY, Role.TOKENIZER, Role.ENGINE, Role.DETOKENIZER)


@functools.cache
def cell() -> list[dict[str, Any]]:
    """All resources of the cell."""
    return rendered(CELL)


def found(kind: str) -> dict[str, Any]:
    """The cell's resources of a kind, by name."""
    return {one["metadata"]["name"]: one["spec"] for one in cell() if one["kind"] == kind}


def literals() -> dict[str, str]:
    (found, _) = load("deploy/kubernetes/cell/kustomization.yaml")["configMapGenerator"]
    return dict(one.split("=", 1) for one in found["literals"])


def peers_of(role: Role) -> dict[str, str]:
    """The addresses of a role's processes, by id."""
    if role is not Role.ENGINE:
        return parse_peers(role, literals()[f"SLUICE_{role.upper()}_PEERS"])
    return {name: one.address for name, one in parse_table((CELL / "engines.toml").read_text()).items()}


def pod_of(role: Role) -> dict[str, Any]:
    pod: dict[str, Any] = found("StatefulSet")[role]["template"]["spec"]
    return pod


def test_resources_keep_to_their_schemas() -> None:
    kinds = set()
    for document in cell():
        kubernetes_validate.validate(document, VERSION, strict=True)
        kinds.add(document["kind"])
    assert {"StatefulSet", "Service", "PodDisruptionBudget", "NetworkPolicy", "Namespace"} <= kinds


@pytest.mark.parametrize("role", ROLES)
def test_peers_are_the_pods_of_a_role(role: Role) -> None:
    spec = found("StatefulSet")[role]
    peers = peers_of(role)
    host = spec["serviceName"]
    assert peers == {f"{role}-{at}": f"tcp://{role}-{at}.{host}:7000" for at in range(spec["replicas"])}
    service = found("Service")[host]
    assert service["clusterIP"] == "None" and service["publishNotReadyAddresses"] is True
    assert service["selector"]["app.kubernetes.io/component"] == role
    assert service["ports"] == [{"name": "ring", "port": 7000, "targetPort": "ring"}]


@pytest.mark.parametrize("role", ROLES)
def test_pods_are_probed_and_locked_down_and_have_the_keys_of_their_role(role: Role) -> None:
    pod = pod_of(role)
    (container,) = pod["containers"]
    environment = {one["name"]: one for one in container["env"]}
    assert environment["SLUICE_ROLE"]["value"] == role
    assert environment["SLUICE_PROCESS_ID"]["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}
    assert set(environment) | set(literals()) <= SETTINGS
    assert container["livenessProbe"]["exec"]["command"] == ["sluice", "healthcheck"] and "startupProbe" in container
    assert ("readinessProbe" in container) is (role is Role.GATEWAY)
    assert container["securityContext"]["readOnlyRootFilesystem"] is True and pod["securityContext"]["runAsNonRoot"]
    assert pod["terminationGracePeriodSeconds"] > 30 and set(container["resources"]) == {"requests", "limits"}
    (keys,) = (one["projected"] for one in pod["volumes"] if one["name"] == "keys")
    assert keys["sources"] == [{"configMap": {"name": "ring-keys"}}, {"secret": {"name": f"ring-keys-{role}"}}]
    assert {"name": "keys", "mountPath": literals()["SLUICE_RING_KEYS"], "readOnly": True} in container["volumeMounts"]


def test_engines_are_read_again_by_the_roles_that_know_them() -> None:
    (_, generated) = load("deploy/kubernetes/cell/kustomization.yaml")["configMapGenerator"]
    assert generated == {"name": "engines", "files": ["engines.toml"], "options": {"disableNameSuffixHash": True}}
    for role in ROLES:
        (container,) = pod_of(role)["containers"]
        mounts = [one["mountPath"] for one in container["volumeMounts"] if one["name"] == "engines"]
        assert mounts == ([] if role is Role.DETOKENIZER else [str(Path(literals()["SLUICE_ENGINES_FILE"]).parent)])


def test_each_role_hears_the_one_before_it_alone() -> None:
    policies = found("NetworkPolicy")
    before = {following: role for role, following in NEXT.items()}
    for role in ROLES:
        rules = policies[role]["ingress"]
        ring = [rule for rule in rules if {"port": "ring", "protocol": "TCP"} in rule["ports"]]
        (source,) = (one["podSelector"]["matchLabels"] for rule in ring for one in rule["from"])
        assert source["app.kubernetes.io/component"] == before[role]
        anyone = [rule["ports"] for rule in rules if "from" not in rule]
        assert anyone == ([[{"port": "grpc", "protocol": "TCP"}]] if role is Role.GATEWAY else [])


def test_one_process_of_a_role_may_be_disrupted() -> None:
    budgets = found("PodDisruptionBudget")
    assert set(budgets) == set(ROLES)
    for role in ROLES:
        assert budgets[role]["maxUnavailable"] == 1
        assert budgets[role]["selector"]["matchLabels"]["app.kubernetes.io/component"] == role


def test_the_page_makes_the_keys_that_pods_mount(tmp_path: Path) -> None:
    page = (KUBERNETES.parents[1] / "docs/kubernetes.md").read_text()
    (listed,) = re.findall(r"sluice keys keys (.*)\n", page)
    ids = [name for role in ROLES for name in peers_of(role)]
    assert sorted(listed.split()) == sorted(ids)
    make_keys(tmp_path, ids)
    for name in ids:
        assert load_keys(str(tmp_path), name) is not None
    for role in ROLES:
        assert f"ring-keys-{role}" in page or "ring-keys-$role" in page


def test_cells_are_scaled_by_queue_and_cache() -> None:
    keda = yaml.safe_load((KUBERNETES / "keda.yaml").read_text())
    assert (keda["apiVersion"], keda["kind"]) == ("keda.sh/v1alpha1", "ScaledObject")
    assert keda["spec"]["scaleTargetRef"]["name"] == "sluice" and keda["spec"]["minReplicaCount"] >= 1
    queries = [one["metadata"]["query"] for one in keda["spec"]["triggers"]]
    names = {name for query in queries for name in re.findall(r"sluice[a-z_:0-9]*", query)}
    assert names <= sample_names() | recorded() and len(queries) == 2
    assert "sluice_requests_waiting" in queries[0] and "sluice_cache_blocks" in queries[1]
