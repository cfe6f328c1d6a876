"""The whole-service benchmark: its HTTP load against a small server, its table, and resuming a stopped run."""

import asyncio
import json
from pathlib import Path

import pytest

from benchmarks.cpu.http_load import Ask, closed_loop
from benchmarks.cpu.plots import draw_service
from benchmarks.cpu.service import read, table
from tests.benchmarks.completions_server import EVENTS, Completions


async def ask(server: Completions, streams: int, requests: int) -> list[int]:
    """Sends the requests and returns the tokens of each."""
    async with await asyncio.start_server(server, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        samples = await closed_loop(Ask(port, "bench", 50, 6), streams, requests, seed=3)
    return [sample.num_tokens for sample in samples if 0 < sample.arrivals[0][0] - sample.start <= sample.end]


async def test_each_stream_keeps_its_connection_and_counts_its_tokens() -> None:
    server = Completions()
    assert await ask(server, streams=3, requests=7) == [6] * 7
    assert (server.num_connections, len(server.bodies)) == (3, 7)
    prompts = {tuple(body["prompt"]) for body in server.bodies if isinstance(body["prompt"], list)}
    assert len(prompts) == 7
    assert all(len(prompt) == 6 and max(prompt) < 50 for prompt in prompts)


@pytest.mark.parametrize(
    ("server", "text"),
    [(Completions("503 Service Unavailable"), "503"), (Completions(events=EVENTS[:1]), "a stream ended with")],
)
async def test_what_is_no_answer_is_an_error(server: Completions, text: str) -> None:
    with pytest.raises(ConnectionError, match=text):
        await ask(server, streams=1, requests=1)


def test_ours_is_compared_with_the_best_peer_of_each_level(tmp_path: Path) -> None:
    kept = tmp_path / "kept.jsonl"
    rows = [
        (run, name, level, {"tokens_per_s": rate + run, "ttft_ms": 5.0})
        for name, rates in (("sluice int8", (30, 60)), ("vLLM, 1 thread", (19, 9)), ("vLLM, 2 threads", (9, 29)))
        for level, rate in zip((1, 8), rates, strict=True)
        for run in (0, 1, 2)
    ]
    kept.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = table(read(kept), [1, 8])
    assert found["throughput_over_best_peer"] == {"sluice int8": {"1": 1.55, "8": 2.03}}
    assert "sluice int8" in draw_service(found)
    assert read(tmp_path / "none") == {}
