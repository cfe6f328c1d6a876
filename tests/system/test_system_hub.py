"""A model named by its hub id: fetched from a hub that speaks the real protocol, then served; and an unknown id."""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from safetensors import safe_open
from sluice.v1 import control_pb2

from tests.oracle.checkpoints import Shape, make_checkpoint
from tests.oracle.tokenizers import byte_level_bpe
from tests.system.service import generate, serve, spec

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = "some-org/tiny"


@contextlib.contextmanager
def hub(directory: Path) -> Iterator[str]:
    """A hub with one repository; yields its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def log_message(self, *_: object) -> None:
            """Writes no log."""

        def _answer(self, with_body: bool) -> None:
            path = self.path.partition("?")[0]
            file = directory / path.rpartition("/")[2]
            if path.startswith(f"/api/models/{NAME}/tree/"):
                entries = [
                    {"type": "file", "path": entry.name, "size": entry.stat().st_size, "oid": COMMIT}
                    for entry in sorted(directory.iterdir())
                ]
                body = json.dumps(entries).encode()
            elif path.startswith(f"/api/models/{NAME}"):
                files = [{"rfilename": entry.name} for entry in sorted(directory.iterdir())]
                body = json.dumps({"id": NAME, "sha": COMMIT, "siblings": files}).encode()
            elif path.startswith(f"/{NAME}/resolve/") and file.is_file():
                body = file.read_bytes()
            else:
                self.send_response(404)
                self.send_header("X-Error-Code", "RepoNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
            self.end_headers()
            if with_body:
                self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def test_a_hub_id_is_fetched_and_served(tmp_path: Path) -> None:
    repository, home = tmp_path / "repository", tmp_path / "home"
    repository.mkdir()
    make_checkpoint(repository, Shape(vocab=404))
    with safe_open(repository / "model.safetensors", framework="pt") as weights:
        num_parameters = sum(weights.get_tensor(name).numel() for name in weights.keys())  # noqa: SIM118 # not a dict
    byte_level_bpe(repository)
    (repository / "pytorch_model.bin").write_bytes(b"never fetched")
    with hub(repository) as endpoint:
        environment = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
        with serve("--model", NAME, environment=environment) as service:
            with service.control() as control:
                model = control.ListModels(control_pb2.ListModelsRequest()).models[0]
            assert (model.id, model.revision) == (NAME, COMMIT)
            assert (model.dtype in ("float32", "bfloat16"), model.parameter_count) == (True, num_parameters)
            with service.stub() as stub:
                assert generate(stub, spec("hello", 4)).completion_tokens == 4
        assert not list(home.rglob("*.bin"))
        command = [sys.executable, "-m", "sluice_server", "serve", "--model", "some-org/other"]
        missing = subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60, check=False
        )
    assert missing.returncode != 0
    assert "some-org/other" in missing.stderr and "check the id" in missing.stderr
    assert "Traceback" not in missing.stderr
