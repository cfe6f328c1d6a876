import contextlib
import json
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import openai
import pytest

from sluice_server.services.gateway.access.identity import digest_of
from tests.services.certificates import Authority, written
from tests.system.service import generate, serve, spec, wait_until

PROMPT = "def add(a, b):\n"


@contextlib.contextmanager
def edge(*options: str, said: list[str] | None = None) -> Iterator[str]:
    """A real `sluice edge`; yields its base URL. It must exit at SIGTERM; its stderr goes to `said`."""
    command = [sys.executable, "-m", "sluice_server", "edge", "--listen", "127.0.0.1:0", *options]
    errors = None if said is None else subprocess.PIPE
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("sluice: edge on http"), line
            yield line.split(" on ")[1].split()[0] + "/v1"
        finally:
            process.terminate()
            written = process.communicate(timeout=30)[1]
            assert process.returncode == 0
            if said is not None:
                said.append(written)


def test_openais_client_gets_what_grpc_gives() -> None:
    with serve("--model", "demo") as service, edge("--address", service.address) as url:
        with service.stub() as stub:
            wanted = generate(stub, spec(PROMPT, 24)).text
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            name = next(iter(client.models.list())).id
            options = {"ignore_eos": True}
            whole = client.completions.create(
                model=name, prompt=PROMPT, max_tokens=24, temperature=0, extra_body=options
            )
            pieces = client.completions.create(
                model=name, prompt=PROMPT, max_tokens=24, temperature=0, extra_body=options, stream=True
            )
            assert whole.choices[0].text == wanted == "".join(piece.choices[0].text for piece in pieces)
            assert whole.usage is not None and whole.usage.completion_tokens == 24


def test_a_secured_service_behind_the_edge(tmp_path: Path) -> None:
    authority = Authority()
    files = written(tmp_path, authority, mutual=True)
    certificate, key = authority.issue("edge").write(tmp_path, "edge")
    access = tmp_path / "access.toml"
    access.write_text(
        f'[tenants.acme]\nrequests_per_minute = 1\n[[keys]]\nsha256 = "{digest_of("k").hex()}"\n'
        'tenant = "acme"\nscopes = ["generate"]\n'
        f'[[keys]]\nsha256 = "{digest_of("c").hex()}"\ntenant = "cli"\nscopes = ["generate"]\n'
    )
    server = ("--tls-cert", files.certificate, "--tls-key", files.key, "--tls-client-ca", tmp_path / "ca.pem")
    client = ("--tls-ca", tmp_path / "ca.pem", "--tls-cert", certificate, "--tls-key", key)
    with serve("--model", "demo", "--access-file", str(access), *map(str, server)) as service:
        reach = ("--address", service.address, *map(str, client))
        https = ("--https-cert", str(files.certificate), "--https-key", str(files.key))
        trusting = openai.DefaultHttpxClient(verify=ssl.create_default_context(cafile=str(tmp_path / "ca.pem")))
        with (
            edge(*reach, *https) as url,
            openai.OpenAI(base_url=url, api_key="k", max_retries=0, http_client=trusting) as asking,
        ):
            assert url.startswith("https://")
            made = asking.completions.create(model="demo", prompt=PROMPT, max_tokens=2)
            assert made.usage is not None and made.usage.completion_tokens <= 2
            with pytest.raises(openai.RateLimitError) as caught:
                asking.completions.create(model="demo", prompt=PROMPT, max_tokens=2)
            assert caught.value.code == "quota_exceeded"
            assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
            with pytest.raises(openai.AuthenticationError):
                asking.with_options(api_key="x").models.list()
        command = [sys.executable, "-m", "sluice_server", "generate", PROMPT, "--max-tokens", "2", *reach]
        refused = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (refused.returncode, "UNAUTHENTICATED" in refused.stderr) == (1, True)
        with_key = {**os.environ, "SLUICE_TOKEN": "c"}
        made_here = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True, env=with_key)
        assert json.loads(made_here.stdout)["usage"]["completion_tokens"] <= 2


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (("--listen", "0.0.0.0:0"), "--insecure"),
        (("--listen", "127.0.0.1:0", "--tls-cert", "/none"), "--tls-key: is needed"),
        (("--listen", "127.0.0.1:0", "--access-file", "/none"), "cannot read /none"),
    ],
)
def test_what_is_not_safe_is_refused_with_what_to_do(options: tuple[str, ...], what: str) -> None:
    command = [sys.executable, "-m", "sluice_server", "serve", "--model", "demo", *options]
    refused = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert refused.returncode != 0
    assert what in refused.stderr


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (("--listen", "0.0.0.0:0"), "--insecure"),
        (("--address", "10.0.0.1:1"), "--insecure"),
        (("--listen", "127.0.0.1:0", "--https-cert", "/none", "--https-key", "/none"), "/none"),
        (("--listen", "nowhere"), "is not host:port"),
        (("--tls-ca", "/none"), "cannot read /none"),
    ],
)
def test_an_edge_that_is_not_safe_is_refused_with_what_to_do(options: tuple[str, ...], what: str) -> None:
    command = [sys.executable, "-m", "sluice_server", "edge", *options]
    refused = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert refused.returncode == 2
    assert what in refused.stderr and "Traceback" not in refused.stderr


def test_a_client_that_goes_away_leaves_no_traceback() -> None:
    said: list[str] = []
    with serve("--model", "demo") as service, edge("--address", service.address, said=said) as url:
        at = urlsplit(url)
        for stream in (False, True):
            asked = {"model": "demo", "prompt": PROMPT, "max_tokens": 1900, "ignore_eos": True, "stream": stream}
            body = json.dumps(asked).encode()
            head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            head += b"content-length: %d\r\n\r\n" % len(body)
            with socket.create_connection((at.hostname or "", at.port or 0)) as gone:
                gone.sendall(head + body)
                if stream:
                    assert gone.recv(4096)
                wait_until(lambda: service.num_running() == 1, 30, "the request does not begin")
            wait_until(lambda: service.num_running() == 0, 30, "the engine works on for a client that went away")
            with socket.create_connection((at.hostname or "", at.port or 0)) as gone:
                gone.sendall(head + body[:9])
    assert said == [""]
