"""A real Shepherd Model Gateway in front of real services, and its HTTP routes."""

import contextlib
import dataclasses
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2

from tests.system.roles import free_ports
from tests.system.service import Service, serve, wait_until

SMG = Path(os.environ.get("SMG", ".venv/smg/bin/smg"))
START_S = 60.0
KEY = "key-of-the-tenant"


@dataclasses.dataclass
class Stack:
    """Services with a listener for SMG each, and SMG in front of them."""

    services: list[Service]
    http: httpx2.Client
    log: Path
    metrics: str  # the URL of SMG's own

    def post(self, path: str, **body: Any) -> dict[str, Any]:  # noqa: ANN401 # JSON
        answer = self.http.post(path, json={"model": "smollm2", **body})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def stream(self, path: str, **body: Any) -> Iterator[dict[str, Any]]:  # noqa: ANN401 # JSON
        """Yields the events of a streamed answer."""
        with self.http.stream("POST", path, json={"model": "smollm2", "stream": True, **body}) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line.removeprefix("data: "))

    def num_indexed(self) -> int:
        """Blocks of all workers' prefix caches that SMG knows of, as its metrics say."""
        lines = httpx2.get(self.metrics).text.splitlines()
        return sum(int(line.split()[-1]) for line in lines if line.startswith("smg_kv_index_blocks{"))

    def chat_text(self, text: str, **body: Any) -> str:  # noqa: ANN401 # JSON
        """The text of a streamed chat."""
        events = self.stream("/v1/chat/completions", messages=[{"role": "user", "content": text}], **body)
        return "".join(one["choices"][0]["delta"].get("content") or "" for one in events if one["choices"])


@contextlib.contextmanager
def smg_before(
    num_services: int, folder: Path, *options: str, program: Path = SMG, model: str = "smollm2"
) -> Iterator[Stack]:
    """Starts services on the published model, and SMG with keys in front. `model`: its name, or its folder."""
    with contextlib.ExitStack() as stack:
        port, metrics, *ports = free_ports(2 + num_services)
        doors = [f"127.0.0.1:{one}" for one in ports]
        common = ("--model", model, "--served-model-name", "smollm2", *options)
        services = [stack.enter_context(serve(*common, "--vllm-listen", door)) for door in doors]
        log = folder / "smg.log"
        command = [
            *(str(program), "launch", "--host", "127.0.0.1", "--port", str(port)),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)),
            *("--tenant-api-key", f"team:{KEY}", "--control-plane-api-keys", "ops:Ops:admin:key-of-operators"),
            *("--health-check-interval-secs", "2", "--tool-call-parser", "json", "--log-dir", str(folder)),
            # Else SMG sends some prompts to a worker that lacks their prefix, on purpose.
            *("--worker-warmup-divert-every", "0", "--worker-warmup-secs", "0"),
            *("--worker-urls", *[f"grpc://{door}" for door in doors]),
        ]
        with log.open("w") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        stack.callback(process.wait, 30)
        stack.callback(process.terminate)
        headers = {"authorization": f"Bearer {KEY}"}
        http = stack.enter_context(httpx2.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=120))
        wait_until(lambda: is_ready(http, log, num_services), START_S, f"SMG is not ready: {log}")
        yield Stack(services, http, log, f"http://127.0.0.1:{metrics}/metrics")


def is_ready(http: httpx2.Client, log: Path, num_services: int) -> bool:
    """Whether SMG serves, with a tokenizer and all workers."""
    with contextlib.suppress(httpx2.HTTPError):
        text = log.read_text()
        is_known = http.get("/v1/models").status_code == 200 and "Successfully loaded tokenizer" in text
        return is_known and text.count("Successfully connected gRPC client") >= num_services
    return False
