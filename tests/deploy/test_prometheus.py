"""A real Prometheus beside a real service: rules and alerts are valid, and every query of every panel returns data."""

import contextlib
import json
import shutil
import signal
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import yaml

from sluice_server.services.telemetry.collector import Collector
from tests.system.roles import free_ports
from tests.system.service import Service, generate, serve, spec, wait_until
from tests.system.test_system_edge import edge
from tools import dashboards

DEPLOY = Path(__file__).parents[2] / "deploy/prometheus"
WINDOW = "20s"

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not shutil.which("prometheus") or not shutil.which("promtool"), reason="needs Debian's prometheus"
    ),
]


def promtool(*arguments: str, text: str = "") -> str:
    done = subprocess.run(["promtool", *arguments], input=text, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_promtool_finds_nothing_wrong() -> None:
    assert "12 rules found" in promtool("check", "rules", str(DEPLOY / "rules.yml"))
    promtool("check", "rules", str(DEPLOY / "alerts.yml"))
    promtool("check", "config", str(DEPLOY / "prometheus.yml"))


def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    series = [
        ('up{job="sluice",instance="engine:9464"}', "1 1 0 0 0 0 0 0"),
        ('sluice_requests_total{code="INTERNAL"}', "0+60x30"),
        ('sluice_requests_total{code="OK"}', "0+60x30"),
        ('sluice_ring_in_total{what="lost",process="engine-0"}', "0+5x30"),
        ('sluice_rank_skew_seconds_total{process="engine-1"}', "9 0 9 0 9 0 0 0 0 0 0 0 0 0 0"),
    ]
    series += [
        ('sluice_memory_level{process="engine-0"}', "0 0 1 1 1 1 1 1 1 1 0"),
        ('sluice_memory_level{process="gateway-0"}', "0 0 2 2 2 2 2 2 2 2 0"),
        ('sluice_memory_oom_kills{process="engine-0",instance="engine:9464"}', "0 0 1 1 1 1 1 1 1 1 1"),
    ]
    down = {"severity": "critical", "job": "sluice", "instance": "engine:9464"}
    expected = [
        ("SluiceProcessDown", "5m", [{"exp_labels": down}]),
        ("SluiceErrors", "15m", [{"exp_labels": {"severity": "critical"}}]),
        ("SluiceRingLoses", "15m", [{"exp_labels": {"severity": "warning", "process": "engine-0"}}]),
        ("SluiceGroupLost", "8m", [{"exp_labels": {"severity": "warning", "process": "engine-1"}}]),
        ("SluiceRanksUneven", "15m", []),
        (
            "SluiceMemoryShort",
            "7m",
            [{"exp_labels": {"severity": "warning", "process": one}} for one in ("engine-0", "gateway-0")],
        ),
        ("SluiceMemoryCritical", "7m", [{"exp_labels": {"severity": "critical", "process": "gateway-0"}}]),
        ("SluiceOutOfMemoryKills", "7m", [{"exp_labels": {"severity": "critical", "instance": "engine:9464"}}]),
        ("SluiceFirstTokenSlow", "15m", []),
    ]
    alerts = {rule["alert"]: rule for rule in yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"][0]["rules"]}
    summaries = {
        "SluiceProcessDown": "engine:9464 does not answer; open streams wait for it",
        "SluiceErrors": "50% of requests fail through no fault of their clients",
        "SluiceGroupLost": "engine-1 and its ranks started anew 3 times in 15 minutes",
        "SluiceRingLoses": "frames to engine-0 get lost; requests are replayed",
        "SluiceMemoryShort": "{process} has little memory left: its cache is made smaller; "
        "raise the limit, or lower --kv-cache-tokens",
        "SluiceMemoryCritical": "{process} has hardly any memory left; new requests are refused",
        "SluiceOutOfMemoryKills": "the kernel has killed a process of {instance}'s control group for memory",
    }
    for name, _, found in expected:
        for one in found:
            one["exp_annotations"] = {"summary": summaries[name].format(**one["exp_labels"])}
        assert name in alerts
    case = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series],
        "alert_rule_test": [{"alertname": name, "eval_time": at, "exp_alerts": found} for name, at, found in expected],
    }
    files = [str(DEPLOY / name) for name in ("rules.yml", "alerts.yml")]
    path = tmp_path / "cases.yml"
    path.write_text(yaml.safe_dump({"rule_files": files, "evaluation_interval": "1m", "tests": [case]}))
    promtool("test", "rules", str(path))


@contextlib.contextmanager
def prometheus(directory: Path, targets: list[str]) -> Iterator[str]:
    """Runs a Prometheus that scrapes `targets` every second and evaluates our rules; yields its address."""
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(DEPLOY / name) for name in config["rule_files"]]
    config["scrape_configs"][0]["static_configs"] = [{"targets": targets}]
    path = directory / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_ports(1)[0]}"
    command = [
        "prometheus",
        f"--config.file={path}",
        f"--storage.tsdb.path={directory}",
        f"--web.listen-address={address}",
    ]
    process = subprocess.Popen([*command, "--log.level=error"])
    try:
        yield address
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def ask(address: str, query: str) -> list[dict[str, object]]:
    """The series that a query returns now, without those that are NaN."""
    url = f"http://{address}/api/v1/query?{urllib.parse.urlencode({'query': query.replace(dashboards.WINDOW, WINDOW)})}"
    with contextlib.suppress(OSError):
        answer = json.loads(urllib.request.urlopen(url, timeout=10).read())
        assert answer["status"] == "success", query
        return [one for one in answer["data"]["result"] if one["value"][1] != "NaN"]
    return []


def load(service: Service) -> None:
    """Sends requests that end in every way that a panel shows."""
    with service.stub() as stub:
        for i in range(6):
            generate(stub, spec("def f(x):\n    return x\n" * (1 + i), 24))
        for wanted, code in (
            (spec("x", top_p=9.0), grpc.StatusCode.INVALID_ARGUMENT),
            (spec("def f(x): return x\n" * 2000), grpc.StatusCode.INVALID_ARGUMENT),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                generate(stub, wanted)
            assert isinstance(caught.value, grpc.Call) and caught.value.code() is code


def test_every_query_of_every_panel_returns_data(tmp_path: Path) -> None:
    collector, (first, *_, last) = Collector(), free_ports(5)
    options = ["--metrics-port", str(first), "--otlp-endpoint", collector.endpoint, "--speculation", "ngram"]
    options += ["--memory-watch"]
    with contextlib.ExitStack() as stack:
        stack.callback(collector.stop)
        service = stack.enter_context(serve(*options, "--draft-length", "fixed", "--max-num-seqs", "2"))
        stack.enter_context(edge("--address", service.address, "--metrics-port", str(last)))
        targets = [*[f"127.0.0.1:{first + i}" for i in range(4)], f"127.0.0.1:{last}"]
        address = stack.enter_context(prometheus(tmp_path, targets))
        wait_until(lambda: len(ask(address, "up == 1")) == 5, 60, "five processes are scraped")
        queries = [query for panels in dashboards.DASHBOARDS.values() for panel in panels for query, _ in panel.queries]
        # an engine of one rank, without adapters, a GPU, or weights in a file
        absent = ("sluice_rank_", "sluice_adapter", "sluice_gpu_", "sluice_weights_")
        queries = [query for query in queries if not any(one in query for one in absent)]
        empty: list[str] = []

        def all_answer() -> bool:
            load(service)
            empty[:] = [query for query in queries if not ask(address, query)]
            return not empty

        with contextlib.suppress(AssertionError):
            wait_until(all_answer, 90, "")
        assert empty == []
        assert len(queries) > 50
        for target in targets:
            text = urllib.request.urlopen(f"http://{target}/metrics", timeout=10).read().decode()
            promtool("check", "metrics", text=text)
        alerts = ask(address, 'ALERTS{alertstate="firing"}')
        assert alerts == []
