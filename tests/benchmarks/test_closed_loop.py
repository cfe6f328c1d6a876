"""A closed loop of requests, by HTTP against a small server: prompts, connections, tokens, bad answers."""

import asyncio
from functools import partial

import pytest

from benchmarks.cpu.closed_loop import Ask, closed_loop
from benchmarks.cpu.http_load import connections
from tests.benchmarks.completions_server import EVENTS, Completions


async def ask(server: Completions, streams: int, requests: int) -> list[int]:
    """Sends the requests and returns the tokens of each."""
    async with await asyncio.start_server(server, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        samples = await closed_loop(partial(connections, port, "bench"), Ask(50, 6), streams, requests, seed=3)
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
