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
from tests.system.service import generate, spec, wait_until

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


def hits_of(stack: Stack) -> list[int]:
    """Prompt tokens that each service took from its prefix cache."""
    found = []
    for service in stack.services:
        with service.control() as control:
            (engine,) = control.GetLoad(control_pb2.GetLoadRequest()).load.engines
            found.append(engine.prefix_hit_tokens)
    return found


def test_a_prompt_goes_to_the_worker_that_has_its_prefix(tmp_path: Path) -> None:
    """Prompts are made warm on one of two workers behind SMG's back, which only the events can tell it."""
    with smg_before(2, tmp_path, "--kv-events") as stack:
        texts = [f"Chapter {n}. " + f"The ship number {n} sails over the sea. " * 12 for n in range(12)]
        for n, text in enumerate(texts):
            with stack.services[n % 2].stub() as stub:
                generate(stub, spec(text, 1))
        before = hits_of(stack)
        for text in texts:
            stack.post("/v1/completions", prompt=text, max_tokens=1)
        wait_until(lambda: sum(hits_of(stack)) > sum(before), 10, "nothing was found in a cache")
        gained = [after - one for after, one in zip(hits_of(stack), before, strict=True)]
        print(f"prompt tokens from the cache: {gained}")
        assert min(gained) > 0 and sum(gained) > 0.62 * 96 * len(texts)  # half by chance


def test_two_workers_share_what_comes_and_each_may_die(tmp_path: Path) -> None:
    with smg_before(2, tmp_path, "--kv-events") as stack:
        prompts = [f"Say something about the number {n}." for n in range(8)]
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda prompt: stack.chat_text(prompt, max_tokens=8, temperature=0), prompts))
        stack.services[0].process.send_signal(signal.SIGTERM)
        stack.services[0].process.wait(60)
        for prompt in prompts:
            assert stack.chat_text(prompt, max_tokens=8, temperature=0)
