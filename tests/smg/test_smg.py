"""The Shepherd Model Gateway of PyPI before real services with a published model. `make test-smg` runs this."""

import concurrent.futures
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from sluice.v1 import control_pb2, inference_pb2

from sluice_server.services.checkpoint.packaged import smollm2_file
from tests.smg.stack import SMG, Stack, smg_before
from tests.system.service import Service, spec, wait_until

pytestmark = [pytest.mark.smg, pytest.mark.timeout(300)]

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "inhabitants": {"type": "integer"}},
    "required": ["city", "inhabitants"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
QUESTION = "What is gravity? Answer in one sentence."
MESSAGES = [{"role": "user", "content": QUESTION}]
GREEDY = {"temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """SMG before one service."""
    assert shutil.which(SMG), "SMG names no program: run make test-smg"
    assert smollm2_file() is not None, "the package of the model is missing: run make test-smg"
    with smg_before(1, tmp_path_factory.mktemp("one")) as stack:
        yield stack


def idle(stack: Stack) -> bool:
    return all(service.num_running() == 0 for service in stack.services)


def test_a_chat_and_its_stream_are_the_same(one: Stack) -> None:
    whole = one.post("/v1/chat/completions", messages=MESSAGES, **GREEDY)
    text = whole["choices"][0]["message"]["content"]
    assert "gravity" in text.lower()
    assert whole["usage"]["completion_tokens"] == 24 or whole["choices"][0]["finish_reason"] == "stop"
    assert one.chat_text(QUESTION, **GREEDY) == text


def test_a_prefix_of_the_cache_is_counted(one: Stack) -> None:
    long = [{"role": "user", "content": "Tell me about the sea. " * 20}]
    answers = [one.post("/v1/chat/completions", messages=long, **GREEDY) for _ in range(2)]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert cached[1] > 64 and cached[1] >= cached[0]


def test_log_probabilities_and_several_outputs(one: Stack) -> None:
    asked = {"messages": MESSAGES, "max_tokens": 4, "n": 2, "seed": 5, "logprobs": True, "top_logprobs": 2}
    choices = one.post("/v1/chat/completions", **asked)["choices"]
    assert sorted(choice["index"] for choice in choices) == [0, 1]
    for choice in choices:
        content = choice["logprobs"]["content"]
        assert len(content) == 4 and all(len(token["top_logprobs"]) == 2 for token in content)
        assert all(token["logprob"] <= 0 for token in content)


def test_a_json_schema_holds(one: Stack) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
    messages = [{"role": "user", "content": "Name a city and its inhabitants, as JSON."}]
    answer = one.post("/v1/chat/completions", messages=messages, response_format=form, temperature=0, max_tokens=80)
    found = json.loads(answer["choices"][0]["message"]["content"])
    assert set(found) == {"city", "inhabitants"} and isinstance(found["inhabitants"], int)


def test_a_named_tool_is_called(one: Stack) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
    answer = one.post(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[tool],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        temperature=0,
        max_tokens=60,
    )
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "weather" and set(json.loads(call["function"]["arguments"])) == {"city"}


def test_responses_are_stored_and_continued(one: Stack) -> None:
    first = one.post("/v1/responses", input="My name is Ada. Say hello.", temperature=0, max_output_tokens=16)
    assert first["status"] in ("completed", "incomplete") and first["output"]
    assert one.http.get(f"/v1/responses/{first['id']}").json()["id"] == first["id"]
    asked = {"input": "What is my name?", "previous_response_id": first["id"], "max_output_tokens": 16}
    second = one.post("/v1/responses", **asked)
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    kinds = [event["type"] for event in one.stream("/v1/responses", input=QUESTION, max_output_tokens=8)]
    assert kinds[0] == "response.created" and "response.output_text.delta" in kinds
    assert kinds[-1] in ("response.completed", "response.incomplete")


def test_vectors_are_those_of_the_contract(one: Stack) -> None:
    found = one.post("/v1/embeddings", input="The sea is blue.")["data"][0]["embedding"]
    asked = inference_pb2.EmbedRequest(inputs=[inference_pb2.EmbedInput(text="The sea is blue.")])
    with one.services[0].stub() as stub:
        expected = stub.Embed(asked, timeout=60).embeddings[0].values
    assert found == pytest.approx(list(expected), abs=1e-6) and len(found) > 100


def test_messages_and_their_stream(one: Stack) -> None:
    asked = {"messages": MESSAGES, "max_tokens": 24, "temperature": 0}
    whole = one.post("/v1/messages", **asked)
    events = list(one.stream("/v1/messages", **asked))
    deltas = [event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta"]
    assert whole["content"][0]["text"] == "".join(deltas) != ""
    assert one.post("/v1/messages/count_tokens", messages=MESSAGES)["input_tokens"] == whole["usage"]["input_tokens"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1500, "ignore_eos": True}),
        ("/v1/responses", {"input": QUESTION, "max_output_tokens": 1500}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1500}),
    ],
)
def test_a_client_that_leaves_ends_its_generation(one: Stack, path: str, body: dict[str, object]) -> None:
    wait_until(lambda: idle(one), 30, "an earlier generation runs on")
    events = one.stream(path, **body)
    for _ in range(4):
        next(events)
    events.close()  # type: ignore[attr-defined] # a generator
    wait_until(lambda: idle(one), 10, "the generation runs on")


def test_what_is_wrong_is_told_as_such(one: Stack) -> None:
    for body, status in (
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, 400),
        ({"messages": MESSAGES, "model": "unknown"}, 404),
        ({"messages": MESSAGES, "frequency_penalty": 1.5, "top_p": 1.5}, 400),
    ):
        answer = one.http.post("/v1/chat/completions", json={"model": "smollm2", "max_tokens": 4, **body})
        assert answer.status_code == status, answer.text
    assert one.http.get("/v1/models", headers={"authorization": "Bearer x"}).status_code in (200, 401)
    denied = one.http.post("/v1/chat/completions", json={"model": "smollm2"}, headers={"authorization": "Bearer x"})
    assert denied.status_code == 401


def test_an_engine_that_is_killed_changes_no_text(one: Stack) -> None:
    asked = {"temperature": 0, "max_tokens": 120}
    prompts = [f"Write about the number {n}." for n in range(6)]
    expected = [one.chat_text(prompt, **asked) for prompt in prompts]
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        running = [pool.submit(one.chat_text, prompt, **asked) for prompt in prompts]
        wait_until(lambda: one.services[0].num_running() == len(prompts), 30, "not all run")
        os.kill(one.services[0].children()["engine-0"].pid, signal.SIGKILL)
        texts = [text.result(120) for text in running]
    assert texts == expected


TEXTS = [f"Chapter {n}. " + f"The ship number {n} sails over the sea. " * 12 for n in range(12)]
BLOCK = 32  # tokens of a cache block


def warm(service: Service, text: str) -> int:
    """Computes a prompt behind SMG's back. Returns the number of cache blocks that it fills."""
    with service.stub() as stub:
        answer = stub.Generate(inference_pb2.GenerateRequest(spec=spec(text, 1)), timeout=60)
    return answer.usage.prompt_tokens // BLOCK


def cached_of(stack: Stack) -> list[int]:
    """Sends all texts through SMG, one after the other. Returns the prompt tokens of each that came from a cache."""
    answers = [stack.post("/v1/completions", prompt=text, max_tokens=1) for text in TEXTS]
    return [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]


def hits_of(service: Service) -> list[int]:
    """Prompt tokens that each engine of a service took from its prefix cache."""
    with service.control() as control:
        load = control.GetLoad(control_pb2.GetLoadRequest()).load
    return [engine.prefix_hit_tokens for engine in load.engines]


def test_every_prompt_goes_to_the_worker_that_has_its_prefix(tmp_path: Path) -> None:
    """Prompts are made warm on one of two workers behind SMG's back, which only the events can tell it. Sent to either
    by chance, all twelve would find their prefixes once in 4,096 runs."""
    with smg_before(2, tmp_path, "--kv-events") as stack:
        num_blocks = sum(warm(stack.services[n % 2], text) for n, text in enumerate(TEXTS))
        wait_until(lambda: stack.num_indexed() >= num_blocks, 30, "SMG does not know the blocks")
        found = cached_of(stack)
        assert min(found) >= 3 * BLOCK, found


def test_every_prompt_goes_to_the_engine_that_has_its_prefix(tmp_path: Path) -> None:
    """Two engines of one service are one worker to SMG, and the service chooses between them."""
    options = ("--kv-events", "--engines", "2", "--routing", "kv-cost", "--allow-shared-cores")
    with smg_before(1, tmp_path, *options) as stack:
        (service,) = stack.services
        with concurrent.futures.ThreadPoolExecutor(4) as pool:  # at once, so that both engines get some
            num_blocks = sum(pool.map(lambda text: warm(service, text), TEXTS))
        wait_until(lambda: stack.num_indexed() >= num_blocks, 30, "SMG does not know the blocks")
        before = hits_of(service)
        found = cached_of(stack)
        assert min(found) >= 3 * BLOCK, found

        def gained() -> list[int]:
            return [after - one for after, one in zip(hits_of(service), before, strict=True)]

        wait_until(lambda: sum(gained()) >= sum(found), 10, "the engines report less")
        assert min(gained()) > 0, "one engine had all prompts"


def test_two_workers_share_what_comes_and_each_may_die(tmp_path: Path) -> None:
    with smg_before(2, tmp_path, "--kv-events") as stack:
        prompts = [f"Say something about the number {n}." for n in range(8)]
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda prompt: stack.chat_text(prompt, max_tokens=8, temperature=0), prompts))
        stack.services[0].process.send_signal(signal.SIGTERM)
        stack.services[0].process.wait(60)
        for prompt in prompts:
            assert stack.chat_text(prompt, max_tokens=8, temperature=0)
