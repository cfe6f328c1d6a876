"""`sluice run-batch`: asks the requests of a file in OpenAI's batch form, and writes their answers to another.

Requests are answered by the application of the HTTP edge, called in this process, without a port: a line has the
fields, the answers and the errors of the same request over HTTP.
"""

import asyncio
import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sluice_server.services.cli.batch_file import AnswerFile, BadLineError, BatchRequest, lines_of, read
from sluice_server.services.cli.connection_options import (
    ADDRESS,
    AddressOption,
    ConnectionOptions,
    TlsCaOption,
    TlsCertOption,
    TlsKeyOption,
    TlsOption,
    TokenOption,
)

if TYPE_CHECKING:
    import httpx2

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
ATTEMPTS = 8  # of one request, while the server is full or restarts
MAX_PAUSE_S = 30.0
BUSY = (429, 503)
NOT_LET_IN = (401, 403)
EDGE = "http://127.0.0.1"  # nothing listens there: the application is called in this process


class BatchStoppedError(Exception):
    """The run cannot go on; the message says why."""


@dataclasses.dataclass(slots=True)
class BatchCounts:
    """How many lines were handled, and how."""

    num_answered: int = 0
    num_failed: int = 0
    num_known: int = 0

    def __str__(self) -> str:
        return f"{self.num_answered} answered, {self.num_failed} failed, {self.num_known} stood there before"


def run_batch(  # noqa: PLR0913 # a command line lists its options
    requests: Annotated[Path, typer.Argument(metavar="INPUT", help="file of requests, one JSON object a line")],
    answers: Annotated[
        Path, typer.Argument(metavar="OUTPUT", help="file of answers; what stands in it is not asked again")
    ],
    address: AddressOption = ADDRESS,
    concurrency: Annotated[
        int, typer.Option(envvar="SLUICE_BATCH_CONCURRENCY", min=1, max=4096, help="requests at once")
    ] = 32,
    tls: TlsOption = False,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    token: TokenOption = None,
) -> None:
    """Answer a file of requests in OpenAI's batch form; the same command goes on where it was broken off."""
    import uvloop

    access = ConnectionOptions.of(address, tls, (tls_ca, tls_cert, tls_key), token)
    num_lines = sum(1 for _ in lines_of(requests))
    counts = BatchCounts()
    with AnswerFile(answers) as out:
        batch = Batch(out, counts, concurrency)
        try:
            uvloop.run(_run(batch, requests, num_lines, (address, access)))
        except KeyboardInterrupt:
            print(f"\nstopped: {counts}; the same command goes on", file=sys.stderr)
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except BatchStoppedError as error:
            print(f"error: {error}\n{counts}; the same command goes on", file=sys.stderr)
            raise typer.Exit(EXIT_FAILED) from None
    print(f"{answers}: {counts}")
    if counts.num_failed:
        raise typer.Exit(EXIT_FAILED)


async def _run(batch: "Batch", requests: Path, num_lines: int, server: tuple[str, ConnectionOptions]) -> None:
    import httpx2
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

    from sluice_server.services.cli.client import aio_channel
    from sluice_server.services.edge.app import build

    address, access = server
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    headers = {"authorization": f"Bearer {access.token}"} if access.token else {}
    async with aio_channel(address, access) as channel:
        transport = httpx2.ASGITransport(build(channel), raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport, base_url=EDGE, headers=headers, timeout=None) as client:
            with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=4) as progress:
                task = progress.add_task("requests", total=num_lines)
                await batch.run(client, lines_of(requests), address, lambda: progress.advance(task))


class Batch:
    """One run over a file of requests."""

    def __init__(self, out: AnswerFile, counts: BatchCounts, concurrency: int, pause_s: float = 0.5) -> None:
        """`pause_s` is waited before the second attempt of a request, where the server names no time."""
        self._out = out
        self._counts = counts
        self._concurrency = concurrency
        self._pause_s = pause_s

    async def run(
        self, client: "httpx2.AsyncClient", lines: Iterator[tuple[int, bytes]], address: str, done: Callable[[], None]
    ) -> None:
        """Ask every line that was not asked before. Raises BatchStoppedError if the server cannot be reached or
        refuses the key; what was answered by then is written."""
        asked = self._asked(lines, done)

        async def work() -> None:
            for request in asked:  # shared by the workers
                await self._ask(client, request, address)
                done()

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._concurrency):
                    group.create_task(work())
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    def _asked(self, lines: Iterator[tuple[int, bytes]], done: Callable[[], None]) -> Iterator[BatchRequest]:
        """Yields the requests to ask; writes the errors of lines that are none."""
        seen: dict[str, int] = {}
        for number, line in lines:
            try:
                request = read(line)
                first = seen.setdefault(request.custom_id, number)
                if first != number:
                    raise BadLineError(f"custom_id {request.custom_id!r} is that of line {first}")
                is_known = request.custom_id in self._out.known
            except BadLineError as error:
                is_known = number in self._out.bad_lines
                if not is_known:
                    self._out.refused(number, str(error))
                    self._counts.num_failed += 1
                    done()
                    continue
            if is_known:
                self._counts.num_known += 1
                done()
                continue
            yield request

    async def _ask(self, client: "httpx2.AsyncClient", request: BatchRequest, address: str) -> None:
        """Ask one request, again while the server is full, and write its answer. Raises BatchStoppedError."""
        for attempt in range(ATTEMPTS):
            response = await client.post(request.url, json=request.body)
            if response.status_code not in BUSY or attempt == ATTEMPTS - 1:
                break
            named = response.headers.get("retry-after")
            await asyncio.sleep(min(MAX_PAUSE_S, float(named) if named else self._pause_s * 2**attempt))
        body = response.json()
        if response.status_code in (*NOT_LET_IN, 503):
            what = "--api-key gives the key" if response.status_code in NOT_LET_IN else "start it, or give --address"
            raise BatchStoppedError(f"{address}: {body['error']['message']}; {what}")
        self._out.answered(request.custom_id, response.status_code, response.headers.get("x-request-id", ""), body)
        if response.status_code < 400:
            self._counts.num_answered += 1
        else:
            self._counts.num_failed += 1
