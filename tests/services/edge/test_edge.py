import asyncio
import socket
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from sluice_server.services.gateway.access.identity import digest_of
from sluice_server.services.messages.messages import Submit
from sluice_server.services.messages.work import ChatPrompt, Generate, TextPrompt, TokenPrompt
from tests.services.edge.edge_rig import EdgeRig, edge
from tests.services.gateway.fake_ring import generation, public, settings, text_of

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


def answering(rig: EdgeRig, *words: str) -> None:
    rig.ring.script = lambda submit: rig.ring.play(*generation(submit, list(words)))


def work(rig: EdgeRig) -> Generate:
    asked = rig.ring.submits[-1].work
    assert isinstance(asked, Generate)
    return asked


async def test_a_chat() -> None:
    async with edge() as rig:
        answering(rig, "hel", "lo")
        made = await rig.client.chat.completions.create(
            model="toy",
            messages=[
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            ],
            temperature=0.5,
            top_p=0.9,
            max_completion_tokens=7,
            stop=["x", "y"],
            seed=-1,
            user="me",
            extra_body={"top_k": 5, "min_p": 0.1, "ignore_eos": True},
        )
        asked = work(rig)
        assert isinstance(asked.prompt, ChatPrompt)
        assert [(one.role, one.content) for one in asked.prompt.messages] == [("system", "be brief"), ("user", "hi")]
        params = asked.params
        assert (params.temperature, params.top_p, params.max_tokens, params.seed) == (0.5, 0.9, 7, (1 << 64) - 1)
        assert (params.top_k, params.min_p, params.ignore_eos, asked.stops.strings) == (5, 0.1, True, ("x", "y"))
        choice = made.choices[0]
        assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "hello", "length")
        assert made.usage is not None and made.usage.prompt_tokens_details is not None
        assert (made.usage.prompt_tokens, made.usage.completion_tokens, made.usage.total_tokens) == (3, 2, 5)
        assert made.usage.prompt_tokens_details.cached_tokens == 1
        assert (made.object, made.created, made.model) == ("chat.completion", 123, "toy")
        assert made.id == "chatcmpl-" + public(rig.ring.submits[-1])


async def test_a_chat_streamed() -> None:
    async with edge() as rig:
        answering(rig, "a", "b", "c")
        stream = await rig.client.chat.completions.create(
            model="toy", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(one.choices[0].delta.content or "" for one in chunks if one.choices) == "abc"
        assert [one.choices[0].finish_reason for one in chunks if one.choices][-1] == "length"
        assert not chunks[-1].choices and chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 3
        assert len({one.id for one in chunks}) == 1


async def test_completions_of_many_prompts() -> None:
    async with edge() as rig:
        answering(rig, "x", "y")
        one = await rig.client.completions.create(model="toy", prompt=[1, 2, 3])
        assert isinstance(work(rig).prompt, TokenPrompt)
        assert work(rig).params.max_tokens == 16
        many = await rig.client.completions.create(model="toy", prompt=["p", "q"], max_tokens=4)
        assert isinstance(work(rig).prompt, TextPrompt)
        assert [(c.index, c.text, c.finish_reason) for c in many.choices] == [(0, "xy", "length"), (1, "xy", "length")]
        assert one.object == "text_completion" and many.usage is not None and many.usage.prompt_tokens == 6
        stream = await rig.client.completions.create(model="toy", prompt="p", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "xy"


async def test_many_prompts_streamed_together() -> None:
    async with edge() as rig:
        answering(rig, "x", "y")
        stream = await rig.client.completions.create(
            model="toy", prompt=["p", "q", "r"], stream=True, stream_options={"include_usage": True}
        )
        *chunks, last = [chunk async for chunk in stream]
        texts = ["".join(one.choices[0].text for one in chunks if one.choices[0].index == at) for at in range(3)]
        assert texts == ["xy"] * 3 and len({one.id for one in chunks}) == 1
        assert last.usage is not None and (last.usage.prompt_tokens, last.usage.completion_tokens) == (9, 6)
        with pytest.raises(openai.BadRequestError):  # one of them is refused: before anything is sent
            await rig.client.completions.create(model="toy", prompt=["p", ""], stream=True)


async def test_many_streams_that_are_dropped_are_cancelled() -> None:
    async with edge() as rig:
        rig.ring.script = lambda submit: rig.ring.play(text_of(submit, 0, "a", first=True))
        stream = await rig.client.completions.create(model="toy", prompt=["p", "q"], stream=True)
        await anext(aiter(stream))
        await stream.close()
        await rig.ring.until(lambda: len(rig.ring.cancels) == 2)


async def test_logprobs_of_both_kinds() -> None:
    async with edge() as rig:
        answering(rig, "a", "b")
        chat = await rig.client.chat.completions.create(model="toy", messages=HELLO, logprobs=True, top_logprobs=2)
        assert work(rig).params.logprobs == 2
        assert chat.choices[0].logprobs is not None and chat.choices[0].logprobs.content is not None
        assert [one.token for one in chat.choices[0].logprobs.content] == ["a", "b"]
        plain = await rig.client.completions.create(model="toy", prompt="p", logprobs=0)
        assert plain.choices[0].logprobs is not None
        assert (plain.choices[0].logprobs.tokens, plain.choices[0].logprobs.text_offset) == (["a", "b"], [0, 1])


async def test_models_and_health() -> None:
    async with edge() as rig:
        assert [one.id async for one in rig.client.models.list()] == ["toy"]
        assert (await rig.client.models.retrieve("toy")).owned_by == "sluice"
        with pytest.raises(openai.NotFoundError) as caught:
            await rig.client.models.retrieve("org/none")
        assert caught.value.code == "model_not_found"
        while (await asyncio.to_thread(raw, rig.url, "GET /healthz"))[0] != 200:
            continue
        rig.gateway.leave()
        while (await asyncio.to_thread(raw, rig.url, "GET /healthz"))[0] != 503:
            continue


def raw(url: str, head: str, body: bytes = b"") -> tuple[int, bytes]:
    """Status and body of one raw request."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as opened:
        opened.sendall(
            f"{head} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        answer = b"".join(iter(lambda: opened.recv(65536), b""))
    return int(answer.split()[1]), answer


@pytest.mark.parametrize(
    ("body", "status", "param", "code"),
    [
        ({"temperature": 1000}, 400, "temperature", "invalid_parameter"),
        ({"temperature": "hot"}, 400, "temperature", None),
        ({"max_tokens": 0}, 400, "max_tokens", "invalid_parameter"),
        ({"max_tokens": -1}, 400, "max_tokens", None),
        ({"max_tokens": 5000}, 400, "max_tokens", "invalid_parameter"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, 400, "max_completion_tokens", None),
        ({"guided_decoding": {}}, 400, "guided_decoding", None),
        ({"suffix": None}, 400, "suffix", None),
        ({"verbosity": "low"}, 400, "verbosity", "unsupported_parameter"),
        ({"logit_bias": {"a": 1}}, 400, "logit_bias", None),
        ({"top_logprobs": 2}, 400, "top_logprobs", None),
        ({"stream_options": {}}, 400, "stream_options", None),
        ({"messages": [{"role": "user"}]}, 400, "messages[0].content", None),
        ({"messages": [{"role": "ghost", "content": ""}]}, 400, "messages[0].role", None),
        ({"stop": ["x"] * 99}, 400, "stop", "invalid_parameter"),
        ({"model": "other"}, 404, None, "model_not_found"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y"}}]}]},
            400,
            "messages[0].content",
            "unsupported_parameter",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_in_openais_shape(
    body: dict[str, Any], status: int, param: str | None, code: str | None, stream: bool
) -> None:
    if stream and "stream_options" in body:
        return
    async with edge() as rig:
        answering(rig, "x")
        wanted = {"model": "toy", "messages": HELLO, **body, **({"stream": True} if stream else {})}
        with pytest.raises(openai.APIStatusError) as caught:
            await rig.client.post("/chat/completions", body=wanted, cast_to=object)
        error = caught.value
        assert (error.status_code, error.param, error.code) == (status, param, code)
        assert isinstance(error.body, dict) and error.body["message"]
        answering(rig, "fine")
        good = await rig.client.chat.completions.create(model="toy", messages=HELLO)
        assert good.choices[0].message.content == "fine"


async def test_what_is_no_request() -> None:
    async with edge() as rig:
        cases = {
            ("POST /v1/chat/completions", b"{"): 400,
            ("POST /v1/chat/completions", b"\xff\xfe"): 400,
            ("POST /v1/chat/completions", b"[" * 100_000): 400,
            ("POST /v1/completions", b"x" * ((16 << 20) + 1)): 413,
            ("GET /v1/chat/completions", b""): 405,
            ("GET /v2", b""): 404,
        }
        for (head, body), status in cases.items():
            found, answer = await asyncio.to_thread(raw, rig.url, head, body)
            assert (found, b'"error"' in answer) == (status, True), head
        async with httpx2.AsyncClient() as client:
            refused = await client.get(f"{rig.url}/v1/chat/completions")
            assert refused.headers["allow"] == "POST" and "it takes POST" in refused.json()["error"]["message"]


def nested(depth: int) -> bytes:
    return b'{"a":' * depth + b"1" + b"}" * depth


@pytest.mark.parametrize("depth", [2_000, 100_000])
@pytest.mark.parametrize(
    "field",
    [
        b'"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": %s}}',
        b'"tools": [{"type": "function", "function": {"name": "x", "parameters": %s}}]',
        b'"chat_template_kwargs": %s',
        b'"unknown": %s',
    ],
    ids=["schema", "tool", "template", "unknown"],
)
async def test_json_that_is_nested_too_deeply_is_refused_in_openais_shape(field: bytes, depth: int) -> None:
    body = b'{"model": "toy", "messages": [{"role": "user", "content": "x"}], ' + field % nested(depth) + b"}"
    async with edge() as rig:
        answering(rig, "x")
        status, answer = await asyncio.to_thread(raw, rig.url, "POST /v1/chat/completions", body)
        assert (status, b'"error"' in answer, b"text/plain" in answer) == (400, True, False), answer


async def test_a_full_server_says_when_to_come_back() -> None:
    async with edge(settings(max_open_requests=1)) as rig:
        first = await until_open(rig)
        with pytest.raises(openai.RateLimitError) as caught:
            await rig.client.chat.completions.create(model="toy", messages=HELLO)
        assert caught.value.response.headers["retry-after"] == "1"
        assert (caught.value.code, caught.value.type) == ("queue_full", "rate_limit_error")
        first.cancel()


async def until_open(rig: EdgeRig, **options: Any) -> "asyncio.Task[object]":  # noqa: ANN401 # of a request
    task: asyncio.Task[object] = asyncio.ensure_future(
        rig.client.chat.completions.create(model="toy", messages=HELLO, **options)
    )
    await rig.ring.next_submit()
    return task


async def test_a_client_that_goes_away_cancels_its_generation() -> None:
    async with edge() as rig:
        waiting = await until_open(rig)
        waiting.cancel()
        await rig.ring.until(lambda: rig.ring.cancels)
        assert rig.ring.cancels == [rig.ring.submits[0].envelope.request_id]


async def test_a_stream_that_is_dropped_cancels_its_generation() -> None:
    async with edge() as rig:
        rig.ring.script = lambda submit: rig.ring.play(text_of(submit, 0, "a", first=True))
        stream = await rig.client.chat.completions.create(model="toy", messages=HELLO, stream=True)
        assert (await anext(aiter(stream))).choices[0].delta.role == "assistant"
        assert not rig.ring.cancels
        await stream.close()
        await rig.ring.until(lambda: rig.ring.cancels)


async def test_a_failure_on_the_way_is_the_last_event() -> None:
    async with edge() as rig:

        def begin_and_break(submit: Submit) -> None:
            rig.ring.play(text_of(submit, 0, "a", first=True))
            rig.ring.play(text_of(submit, 5, "gap"))

        rig.ring.script = begin_and_break
        stream = await rig.client.chat.completions.create(model="toy", messages=HELLO, stream=True)
        with pytest.raises(openai.APIError) as caught:
            async for _ in stream:
                pass
        assert caught.value.code == "stage_lost"


async def test_the_key_of_the_client_is_the_key_of_the_call(tmp_path: Path) -> None:
    file = tmp_path / "access.toml"
    digest = digest_of("right").hex()
    file.write_text(f'[[keys]]\nsha256 = "{digest}"\ntenant = "acme"\nscopes = ["generate"]\n')
    async with edge(settings(access_file=file), "right") as rig:
        answering(rig, "x")
        await rig.client.chat.completions.create(model="toy", messages=HELLO)
        assert rig.ring.submits[-1].envelope.tenant == "acme"
        with pytest.raises(openai.AuthenticationError) as caught:
            await rig.client.with_options(api_key="wrong").models.list()
        assert caught.value.code == "credentials_invalid"
