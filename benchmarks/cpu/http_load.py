"""A closed loop of streamed completions on a server with OpenAI's HTTP interface, as light as it can be: one connection
a stream, kept, and server-sent events counted without being parsed.

In come an address and what to send, out come samples as those of `sluice bench`. Knows nothing of who serves.
"""

import asyncio
import dataclasses
import json
import random
import time

from sluice_server.services.cli.load import RequestSample, random_prompt

END = b"[DONE]"


@dataclasses.dataclass(frozen=True, slots=True)
class Ask:
    """What every request is: `length` random ids below `vocab` in, as many out, greedy."""

    port: int
    model: str
    vocab: int
    length: int

    def body(self, rng: random.Random) -> bytes:
        """Of one request."""
        prompt = random_prompt(rng, self.vocab, self.length)
        fields = {"model": self.model, "prompt": prompt, "max_tokens": self.length, "temperature": 0.0}
        return json.dumps({**fields, "ignore_eos": True, "stream": True}).encode()


async def closed_loop(ask: Ask, streams: int, requests: int, seed: int) -> list[RequestSample]:
    """`requests` of them, `streams` at a time. Raises ConnectionError for an answer that is none."""
    rng = random.Random(seed)
    waiting = [ask.body(rng) for _ in range(requests)]
    samples: list[RequestSample] = []

    async def stream() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", ask.port)
        try:
            while waiting:
                samples.append(await _one(reader, writer, waiting.pop(), ask.length))
        finally:
            writer.close()

    await asyncio.gather(*(stream() for _ in range(streams)))
    return samples


async def _one(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes, num_tokens: int
) -> RequestSample:
    """One request. All tokens are put at the end but the first, whose event is the first: their number is known."""
    start = time.perf_counter()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
    status = await reader.readuntil(b"\r\n\r\n")
    if b" 200 " not in status.split(b"\r\n")[0]:
        raise ConnectionError(status.decode(errors="replace"))
    first, last = 0.0, b""
    while size := int(await reader.readline(), 16):
        chunk = (await reader.readexactly(size + 2))[:size]
        first = first or time.perf_counter()
        last = (last + chunk)[-64:]
    await reader.readline()  # the end of the chunks
    end = time.perf_counter()
    if END not in last:
        raise ConnectionError(f"a stream ended with {last!r}")
    return RequestSample(start, ((first, 1), (end, num_tokens - 1)), end)
