"""A way to send completions to a server with OpenAI's HTTP interface, as light as it can be: connections that are kept,
and server-sent events of which none is parsed. Knows nothing of who serves.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Mapping

from benchmarks.cpu.goodput import Flight
from benchmarks.cpu.open_loop import Completion, Send

END = b"[DONE]"

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def connections(
    port: int, model: str, more: Mapping[str, object] | None = None, *, keeps: bool = True
) -> AsyncIterator[Send]:
    """A way to send on connections that are taken again when they are free, or each once if the server `keeps` none.
    `more`: further fields of the body."""
    free: list[Connection] = []
    taken: set[asyncio.StreamWriter] = set()

    async def on_any(one: Completion, flight: Flight) -> None:
        while free and free[-1][0].at_eof():  # servers close what has been idle for some seconds
            free.pop()[1].close()
        connection = free.pop() if free else await asyncio.open_connection("127.0.0.1", port)
        taken.add(connection[1])
        await send(connection, model, one, flight, more)
        taken.discard(connection[1])
        if keeps:
            free.append(connection)
        else:
            connection[1].close()

    try:
        yield on_any
    finally:
        for writer in (*taken, *(writer for _, writer in free)):
            writer.close()


async def send(
    connection: Connection, model: str, one: Completion, flight: Flight, more: Mapping[str, object] | None = None
) -> None:
    """Sends a request and reads its answer. Raises ConnectionError for an answer that is none."""
    reader, writer = connection
    fields = {"model": model, "prompt": list(one.prompt), "max_tokens": one.num_tokens, "temperature": 0.0}
    body = json.dumps({**fields, "ignore_eos": True, "stream": True, **(more or {})}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
    try:
        await _read(reader, flight)
    except EOFError as error:
        raise ConnectionError("the server closed the connection") from error
    flight.end = time.perf_counter()


async def _read(reader: asyncio.StreamReader, flight: Flight) -> None:
    status = await reader.readuntil(b"\r\n\r\n")
    if b" 200 " not in status.split(b"\r\n")[0]:
        raise ConnectionError(status.decode(errors="replace"))
    first, last = 0.0, b""
    while size := int(await reader.readline(), 16):
        chunk = (await reader.readexactly(size + 2))[:size]
        if not first:
            flight.first = first = time.perf_counter()
        last = (last + chunk)[-64:]
    await reader.readline()  # the end of the chunks
    if END not in last:
        raise ConnectionError(f"a stream ended with {last!r}")
