"""A gateway that tells what memory it holds; told to, it keeps a little of every request it has closed: the control
that a check for leaks must catch.

In use is what malloc and Python's allocator have given out and not got back. Whenever SIGHUP comes it is written to
`WATCH_FILE`, as JSON; `LEAK_BYTES` is what is kept of a request.
"""

import asyncio
import ctypes
import gc
import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import typer

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import ServiceError
from sluice_server.services.cli.options import takes_settings
from sluice_server.services.config import ServiceConfig
from sluice_server.services.gateway import process as gateway_process
from sluice_server.services.gateway.requests.manager import RequestManager
from sluice_server.services.gateway.requests.open_request import OpenRequest
from sluice_server.services.process.joining import Common
from sluice_server.services.process.roles import run_role

serve = gateway_process.run


class Heap(ctypes.Structure):
    """glibc's struct mallinfo2: of all arenas together."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks")
    ] + [("keepcost", ctypes.c_size_t)]


def in_use() -> dict[str, int]:
    """Bytes that malloc and blocks that Python's allocator have given out, after a garbage collection."""
    gc.collect()
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Heap
    heap = mallinfo2()
    return {"malloc_bytes": heap.uordblks + heap.hblkhd, "python_blocks": sys.getallocatedblocks()}


async def run(
    engine: EngineConfig,
    config: ServiceConfig,
    common: Common,
    telling: Callable[[], AbstractAsyncContextManager[None]],
) -> int:
    """Runs the gateway's process with the watch."""
    path = Path(os.environ["WATCH_FILE"])

    def write() -> None:
        new = path.with_suffix(".new")
        new.write_text(json.dumps(in_use()))
        new.replace(path)

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, write)
    return await serve(engine, config, common, telling)


@takes_settings
def main(engine: EngineConfig, service: ServiceConfig) -> None:
    """Runs one gateway of a ring."""
    num_bytes = int(os.environ.get("LEAK_BYTES", "0"))
    kept: list[bytes] = []
    close = RequestManager.close

    def close_and_keep(manager: RequestManager, request: OpenRequest, error: ServiceError | None = None) -> None:
        kept.append(request.envelope.request_id.encode() * (num_bytes // 32))
        close(manager, request, error)

    if num_bytes:
        RequestManager.close = close_and_keep  # type: ignore[assignment,method-assign] # the fault itself
    gateway_process.run = run  # what the role's own body calls
    raise typer.Exit(run_role(engine, service))


if __name__ == "__main__":
    typer.run(main)
