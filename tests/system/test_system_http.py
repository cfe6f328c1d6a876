"""`sluice serve --http`: one command gives gRPC and HTTP, and the edge is kept running as the ring's processes are."""

import itertools
import json
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx2
import openai
import pytest
from sluice.v1 import inference_pb2

from tests.system.service import Service, generate, serve, spec, wait_until

PROMPT = "def add(a, b):\n"
NUM = 400
ASK = {"model": "demo", "prompt": PROMPT, "max_tokens": NUM, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def service() -> Iterator[Service]:
    with serve("--model", "demo", "--http", "127.0.0.1:0") as running:
        yield running


def is_ready(service: Service) -> bool:
    try:
        return httpx2.get(service.http + "/health/ready", timeout=60).status_code == 200
    except httpx2.TransportError:
        return False


def test_one_command_gives_both_and_an_edge_that_dies_comes_back(service: Service) -> None:
    with service.stub() as stub:
        wanted = generate(stub, spec(PROMPT, NUM)).text
        with openai.OpenAI(base_url=service.http + "/v1", api_key="none", max_retries=0) as client:
            (model,) = client.models.list()
            made = client.completions.create(model=model.id, prompt=PROMPT, max_tokens=8, temperature=0)
            assert model.created > 0 and wanted.startswith(made.choices[0].text)
        body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "model": "demo"}).encode()
        plain = httpx2.post(service.http + "/v1/chat/completions", content=body, timeout=60)
        assert (plain.status_code, plain.json()["error"]["param"]) == (415, "content-type")
        assert httpx2.get(service.http + "/version", headers={"host": "evil.example"}, timeout=60).status_code == 421
        edge = service.children()["edge-0"]
        beside = stub.StreamGenerate(inference_pb2.StreamGenerateRequest(spec=spec(PROMPT, NUM)))
        texts = [event.delta.text for event in [next(beside), next(beside)]]
        edge.kill()
        assert "".join([*texts, *(event.delta.text for event in beside)]) == wanted
        wait_until(lambda: is_ready(service), 30, "the edge does not come back")
        assert service.children()["edge-0"].pid != edge.pid
        assert (
            httpx2.post(service.http + "/v1/completions", json=ASK, timeout=60).json()["choices"][0]["text"] == wanted
        )


def test_a_stream_over_http_ends_well_when_the_service_is_stopped(service: Service) -> None:
    with service.stub() as stub:
        wanted = generate(stub, spec(PROMPT, NUM)).text
    texts: list[str] = []
    with httpx2.stream("POST", service.http + "/v1/completions", json={**ASK, "stream": True}, timeout=60) as answer:
        lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
        texts.append(json.loads(next(lines))["choices"][0]["text"])
        service.process.send_signal(signal.SIGTERM)
        rest = list(lines)
    assert rest[-1] == "[DONE]"
    assert "".join([*texts, *(json.loads(one)["choices"][0]["text"] for one in rest[:-1])]) == wanted
    assert service.process.wait(60) == 0


def streamed(lines: Iterator[str]) -> tuple[str, int]:
    """The text of the chunks that are left, and the tokens of their usage. The stream must end well."""
    *chunks, last = lines
    assert last == "[DONE]", last
    found = [json.loads(one) for one in chunks]
    text = "".join(one["choices"][0]["delta"].get("content", "") for one in found if one["choices"])
    return text, found[-1]["usage"]["completion_tokens"]


@pytest.mark.long
def test_http_clients_do_not_notice_that_their_gateway_dies(service: Service) -> None:
    num, timeout = 1500, 60
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": num, "seed": 7, "ignore_eos": True}
    chat |= {"temperature": 1, "stream": True, "stream_options": {"include_usage": True}}

    def complete() -> str:
        asked = {**ASK, "max_tokens": num}
        answer = httpx2.post(service.http + "/v1/completions", json=asked, timeout=timeout).json()
        text: str = answer["choices"][0]["text"]
        return text

    def converse(begun: Callable[[], None]) -> tuple[str, int]:
        with httpx2.stream("POST", service.http + "/v1/chat/completions", json=chat, timeout=timeout) as answer:
            lines = (one.removeprefix("data: ") for one in answer.iter_lines() if one)
            first = next(lines)
            begun()
            return streamed(itertools.chain((first,), lines))

    def kill_gateway() -> None:
        wait_until(lambda: service.num_running() == 1, 30, "the request does not begin")
        service.children()["gateway-0"].kill()

    whole, stream = complete(), converse(lambda: None)
    assert stream[1] == num
    with ThreadPoolExecutor() as pool:
        again = pool.submit(complete)
        kill_gateway()
        assert again.result() == whole
    assert converse(lambda: service.children()["gateway-0"].kill()) == stream
