"""The compose profiles: each is valid, and its mounts and addresses exist and fit. Uses no image."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from sluice_server.engine.config import EngineConfig
from sluice_server.services.config import ServiceConfig
from sluice_server.services.process.edge_settings import variable
from sluice_server.services.ranks.settings import rank_table
from tools import dashboards

ROOT = Path(__file__).parents[2]
CORE = {"keys", "gateway", "tokenizer", "engine", "detokenizer"}
WATCHERS = {"otel-collector", "tempo", "prometheus", "grafana"}
PROFILES = {"": CORE, "http": CORE | {"edge"}, "gpu": CORE | {"engine-gpu"}, "observability": CORE | WATCHERS}
PROFILES["smg"] = CORE | {"smg"}
RANKS = {"engine-ranks": "engine-0", "worker-1": "worker-0-1", "worker-2": "worker-0-2"}
PROFILES["ranks"] = CORE | set(RANKS)
OTLP, METRICS = 4317, 9464


def load(path: str) -> Any:  # noqa: ANN401 # as YAML has it
    return yaml.safe_load((ROOT / path).read_text())


SERVICES: dict[str, dict[str, Any]] = load("compose.yaml")["services"]


def compose() -> list[str]:
    """The compose command, as plugin or program; skips if there is neither."""
    if shutil.which("docker") and not subprocess.run(["docker", "compose", "version"], capture_output=True).returncode:
        return ["docker", "compose"]
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    pytest.skip("needs docker compose")


@pytest.mark.parametrize("profile", list(PROFILES))
def test_compose_finds_each_profile_valid(profile: str) -> None:
    chosen = ["--profile", profile] if profile else []
    done = subprocess.run(
        [*compose(), *chosen, "config", "--services"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) >= PROFILES[profile]


def networks(name: str) -> set[str]:
    return set(SERVICES[name].get("networks", ()))


def mounts(name: str) -> dict[str, Path]:
    """The mounted files and folders of the repository, by their path in the container."""
    found = {}
    for volume in SERVICES[name].get("volumes", ()):
        source, target = volume.split(":")[:2]
        if source.startswith("./"):
            found[target] = ROOT / source
    return found


def test_what_is_mounted_is_there_and_read_only() -> None:
    for name, service in SERVICES.items():
        assert all(source.exists() for source in mounts(name).values()), name
        assert all(volume.endswith(":ro") for volume in service.get("volumes", ()) if volume.startswith("./")), name


@pytest.mark.parametrize(("name", "flag"), [("otel-collector", "--config="), ("tempo", "-config.file=")])
def test_who_is_told_of_a_file_finds_it_mounted(name: str, flag: str) -> None:
    (argument,) = SERVICES[name]["command"]
    assert argument.removeprefix(flag) in mounts(name)


def test_prometheus_finds_its_configuration_where_its_image_looks() -> None:
    assert {one.name for one in mounts("prometheus")["/etc/prometheus"].iterdir()} >= {"prometheus.yml", "rules.yml"}


@pytest.mark.skipif(not shutil.which("promtool"), reason="needs Debian's prometheus")
def test_promtool_takes_what_is_mounted() -> None:
    config = mounts("prometheus")["/etc/prometheus"] / "prometheus.yml"
    done = subprocess.run(["promtool", "check", "config", str(config)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "2 rule files found" in done.stdout, done.stdout + done.stderr


def test_prometheus_scrapes_every_role_where_it_is() -> None:
    (job,) = load("deploy/prometheus/prometheus.yml")["scrape_configs"]
    targets = {target for one in job["static_configs"] for target in one["targets"]}
    assert targets == {f"{role}:{METRICS}" for role in CORE - {"keys"}}
    for role in CORE - {"keys"}:
        assert SERVICES[role]["environment"]["SLUICE_METRICS_PORT"] == str(METRICS)
        assert networks(role) & networks("prometheus"), f"{role} cannot be reached"
    (found,) = job["dns_sd_configs"]
    assert (found["names"], found["port"]) == (["edge"], METRICS) and networks("edge") & networks("prometheus")
    assert SERVICES["edge"]["environment"][variable("metrics_port")] == str(METRICS)


def test_the_other_engine_is_found_under_the_name_of_the_first() -> None:
    gpu = SERVICES["engine-gpu"]
    assert gpu["networks"] == {"ring": {"aliases": ["engine"]}} and gpu["environment"]["SLUICE_DEVICE"] == "cuda"
    assert SERVICES["gateway"]["environment"]["SLUICE_ENGINE_PEERS"] == "engine-0=tcp://engine:7000"


def test_ranks_know_where_each_other_is_and_have_a_key_each() -> None:
    keys = SERVICES["keys"]
    for name, rank in RANKS.items():
        service = SERVICES[name]
        environment = service["environment"]
        assert service["profiles"] == ["ranks"] and service["read_only"] is True and service["cap_drop"] == ["ALL"]
        role = "engine" if rank == "engine-0" else "worker"
        assert environment["SLUICE_ROLE"] == role
        assert environment.get("SLUICE_PROCESS_ID", "engine-0") == rank
        assert any(volume == f"keys-{name.replace('engine-ranks', 'engine')}:/keys:ro" for volume in service["volumes"])
        assert rank in keys["command"][0]
        config = EngineConfig(pipeline_parallel_size=3)
        table = rank_table(config, ServiceConfig(role=role, rank_peers=environment["SLUICE_RANK_PEERS"]), rank)
        host = table.hosts[table.rank]
        assert host == name or host in service["networks"]["ring"]["aliases"]
        assert environment["SLUICE_PIPELINE_PARALLEL_SIZE"] == "${SLUICE_PIPELINE_PARALLEL_SIZE:-3}"
    made = [f"keys-{name}" for name in ("worker-1", "worker-2")]
    assert all(f"{volume}:/keys/{volume.removeprefix('keys-')}" in keys["volumes"] for volume in made)
    assert "detokenizer worker-1 worker-2; do install" in (ROOT / "Dockerfile").read_text()


def test_each_rank_gets_its_own_secret_key(tmp_path: Path) -> None:
    """What the job that makes keys does, with folders in the place of volumes."""
    (script,) = SERVICES["keys"]["command"]
    text = script.replace("$$", "$").replace("/keys", str(tmp_path))
    roles = [volume.split(":")[0].removeprefix("keys-") for volume in SERVICES["keys"]["volumes"]]
    for role in roles:
        (tmp_path / role).mkdir()
    program = tmp_path / "sluice"
    program.write_text(
        '#!/bin/sh\nshift; to=$1; shift; for id in "$@"; do touch "$to/$id.key" "$to/$id.key_secret"; done\n'
    )
    program.chmod(0o755)
    subprocess.run(["sh", "-euc", text], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, check=True, timeout=60)
    found = {role: sorted(path.stem for path in (tmp_path / role).glob("*.key_secret")) for role in roles[1:]}
    assert found == {
        **{role: [f"{role}-0"] for role in ("gateway", "tokenizer", "engine", "detokenizer")},
        "worker-1": ["worker-0-1"],
        "worker-2": ["worker-0-2"],
    }
    assert all(len(list((tmp_path / role).glob("*.key"))) == 6 for role in roles[1:])


def collector() -> dict[str, Any]:
    found: dict[str, Any] = load("deploy/otel/collector.yaml")
    return found


def test_the_collector_is_configured_as_its_documentation_has_it() -> None:
    schema = json.loads((ROOT / "tests/deploy/collector.schema.json").read_text())
    jsonschema.validate(collector(), schema)
    wrong = collector()
    wrong["processors"]["memory_limiter"]["limit_mb"] = 1
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, schema)


def test_the_collectors_pipelines_have_what_they_name_and_nothing_idles() -> None:
    config = collector()
    pipelines = config["service"]["pipelines"].values()
    for kind in ("receivers", "processors", "exporters"):
        assert {name for one in pipelines for name in one[kind]} == set(config[kind])
    assert all(one["processors"][0] == "memory_limiter" for one in pipelines), "it is to come first"
    limit = int(SERVICES["otel-collector"]["mem_limit"].removesuffix("m"))
    assert config["processors"]["memory_limiter"]["limit_mib"] < limit


def test_spans_find_their_way_from_role_to_tempo() -> None:
    config, tempo = collector(), load("deploy/otel/tempo.yaml")
    assert config["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"] == f"0.0.0.0:{OTLP}"
    assert f"SLUICE_OTLP_ENDPOINT=http://otel-collector:{OTLP}" in (ROOT / "compose.yaml").read_text()
    host, port = config["exporters"]["otlp/tempo"]["endpoint"].split(":")
    taken = tempo["distributor"]["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"]
    assert host in SERVICES and taken == f"0.0.0.0:{port}"
    assert networks(host) & networks("otel-collector")
    assert all(networks(role) & networks("otel-collector") for role in CORE - {"keys"})
    kept = tempo["storage"]["trace"]
    assert all(any(path.startswith(f"{place}/") for place in volumes("tempo")) for path in places(kept))


def volumes(name: str) -> set[str]:
    return {volume.split(":")[1] for volume in SERVICES[name]["volumes"]}


def places(kept: dict[str, Any]) -> Iterator[str]:
    yield from (kept[part]["path"] for part in ("wal", "local"))


def test_grafana_finds_its_sources_and_dashboards() -> None:
    mounted = mounts("grafana")
    provisioning = mounted["/etc/grafana/provisioning"]
    sources = yaml.safe_load((provisioning / "datasources/sluice.yaml").read_text())["datasources"]
    ports = {"prometheus": 9090, "tempo": load("deploy/otel/tempo.yaml")["server"]["http_listen_port"]}
    assert {one["url"] for one in sources} == {f"http://{name}:{port}" for name, port in ports.items()}
    assert all(networks(name) & networks("grafana") for name in ports)
    (provider,) = yaml.safe_load((provisioning / "dashboards/sluice.yaml").read_text())["providers"]
    folder = mounted[provider["options"]["path"]]
    assert {path.stem for path in folder.iterdir()} == set(dashboards.DASHBOARDS)
    home = Path(SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (mounted[str(home.parent)] / home.name).exists()
    boards = [json.loads(path.read_text()) for path in folder.iterdir()]
    assert len({board["uid"] for board in boards}) == len(boards)
    uids = {target["datasource"]["uid"] for board in boards for one in board["panels"] for target in one["targets"]}
    assert uids <= {one["uid"] for one in sources}


def test_every_watcher_has_a_pinned_image_and_limits() -> None:
    for name in WATCHERS:
        service = SERVICES[name]
        tag = service["image"].rpartition(":")[2]
        assert service["profiles"] == ["observability"] and tag.lstrip("v").count(".") == 2
        assert service["mem_limit"] and service["cap_drop"] == ["ALL"]


def test_smg_reaches_the_gateway_on_its_loopback_and_needs_keys() -> None:
    smg, gateway = SERVICES["smg"], SERVICES["gateway"]
    assert smg["network_mode"] == "service:gateway" and "networks" not in smg
    assert all(port.startswith("127.0.0.1:") for port in gateway["ports"])
    entry = (ROOT / smg["build"]["context"] / "start.sh").read_text()
    for flag in ("--host ", "--prometheus-host 127.0.0.1", '--tenant-api-key "${SMG_TENANT_KEY:?'):
        assert flag in entry
    assert '--control-plane-api-keys "${SMG_CONTROL_KEY:?' in entry and smg["restart"] == "unless-stopped"


@pytest.mark.parametrize(("loses_network", "status"), [(True, 1), (False, 143)])
def test_smg_ends_with_the_network_of_the_gateway(tmp_path: Path, loses_network: bool, status: int) -> None:
    """A gateway that restarts has a new network namespace, in which only a container that starts again is."""
    net, program = tmp_path / "net", tmp_path / "smg"
    header, loopback = "Inter-| Receive\n face |bytes\n", "    lo: 1\n"
    net.write_text(f"{header}{loopback}  eth0: 1\n")
    program.write_text("#!/bin/sh\necho started; exec sleep 60\n")
    program.chmod(0o755)
    keys = {"SMG_TENANT_KEY": "a:b", "SMG_CONTROL_KEY": "a:b:admin:c", "INTERFACES": str(net), "EVERY": "0.05"}
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PAUSE": "0", **keys}
    command = ["sh", str(ROOT / "deploy/smg/start.sh")]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "started\n"
        if loses_network:
            net.write_text(f"{header}{loopback}")
        else:
            process.terminate()
        assert process.wait(30) == status
