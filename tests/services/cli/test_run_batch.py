"""A run over a batch: bounded, resumable, and ended where the server is gone or refuses the key."""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest

from sluice_server.services.cli.batch_file import AnswerFile
from sluice_server.services.cli.run_batch import ATTEMPTS, Batch, BatchCounts, BatchStoppedError
from sluice_server.services.edge.app import build
from tests.services.gateway.fake_ring import generation, running

Answer = Callable[[httpx2.Request], httpx2.Response]


def lines(*names: str, url: str = "/v1/completions") -> Iterator[tuple[int, bytes]]:
    for number, name in enumerate(names, 1):
        body = {"prompt": name, "max_tokens": 3}
        yield number, json.dumps({"custom_id": name, "url": url, "body": body}).encode() if name else b"{}"


def failing(status: int, **headers: str) -> httpx2.Response:
    return httpx2.Response(status, json={"error": {"message": "why"}}, headers=headers)


async def run(path: Path, answer: Answer, *names: str, concurrency: int = 2) -> BatchCounts:
    counts = BatchCounts()
    with AnswerFile(path) as out:
        async with httpx2.AsyncClient(transport=httpx2.MockTransport(answer), base_url="http://edge") as client:
            await Batch(out, counts, concurrency, pause_s=0.0).run(client, lines(*names), "host:1", lambda: None)
    return counts


def written(path: Path) -> dict[str | None, dict[str, object]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({one["custom_id"] for one in found}) == len(found)
    return {one["custom_id"]: one for one in found}


async def test_each_line_has_its_answer_or_its_error_and_is_asked_once(tmp_path: Path) -> None:
    asked: list[str] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        name = json.loads(request.content)["prompt"]
        asked.append(name)
        return failing(400) if name == "bad" else httpx2.Response(200, json={"of": name}, headers={"x-request-id": "r"})

    path = tmp_path / "out.jsonl"
    counts = await run(path, answer, "a", "bad", "", "b", "a")  # twice the same id: the second is no request
    assert (counts.num_answered, counts.num_failed, counts.num_known) == (2, 3, 0)
    lines_of_file = [json.loads(line) for line in path.read_text().splitlines()]
    errors = {one["line"]: one["error"]["message"] for one in lines_of_file if one["error"]}
    assert "custom_id 'a' is that of line 1" in errors[5] and "line 3" in errors[3]
    found = {one["custom_id"]: one["response"] for one in lines_of_file if one["response"]}
    assert found["b"] == {"status_code": 200, "request_id": "r", "body": {"of": "b"}}
    assert found["bad"]["status_code"] == 400
    again = await run(path, answer, "a", "bad", "", "b", "a", "c")
    assert (again.num_answered, again.num_failed, again.num_known) == (1, 0, 5)
    assert sorted(asked) == ["a", "b", "bad", "c"]


async def test_a_full_server_is_asked_again(tmp_path: Path) -> None:
    answers = [failing(429), failing(503, **{"retry-after": "0"}), httpx2.Response(200, json={})]
    counts = await run(tmp_path / "out", lambda request: answers.pop(0), "a")
    assert counts.num_answered == 1 and not answers
    counts = await run(tmp_path / "full", lambda request: failing(429), "a")
    assert counts.num_failed == 1 and len(written(tmp_path / "full")) == 1


@pytest.mark.parametrize(("status", "num", "said"), [(503, ATTEMPTS, "--address"), (401, 1, "--api-key")])
async def test_what_is_no_answer_ends_the_run_and_is_not_written(
    tmp_path: Path, status: int, num: int, said: str
) -> None:
    asked: list[httpx2.Request] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        asked.append(request)
        return failing(status)

    with pytest.raises(BatchStoppedError, match=f"host:1: why; .*{said}"):
        await run(tmp_path / "out", answer, "a", "b", "c", concurrency=1)
    assert len(asked) == num and written(tmp_path / "out") == {}


async def test_no_more_than_the_bound_run_at_once(tmp_path: Path) -> None:
    now = most = 0

    async def answer(request: httpx2.Request) -> httpx2.Response:
        nonlocal now, most
        now += 1
        most = max(most, now)
        for _ in range(3):
            await asyncio.sleep(0)
        now -= 1
        return httpx2.Response(200, json={})

    counts = BatchCounts()
    with AnswerFile(tmp_path / "out") as out:
        async with httpx2.AsyncClient(transport=httpx2.MockTransport(answer), base_url="http://edge") as client:
            await Batch(out, counts, 3).run(client, lines(*map(str, range(20))), "", lambda: None)
    assert (most, counts.num_answered) == (3, 20)


async def test_the_edge_answers_in_this_process(tmp_path: Path) -> None:
    counts = BatchCounts()
    async with running() as rig:
        rig.ring.script = lambda submit: rig.ring.play(*generation(submit, ["a", "b"]))
        transport = httpx2.ASGITransport(build(rig.channel), raise_app_exceptions=False)
        with AnswerFile(tmp_path / "out") as out:
            async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
                await Batch(out, counts, 2).run(client, lines("x", "y"), "", lambda: None)
    assert counts.num_answered == 2
    for one in written(tmp_path / "out").values():
        response = one["response"]
        assert isinstance(response, dict) and response["body"]["choices"][0]["text"] == "ab"
