"""The HTTP edge on a real port before a gateway whose ring the test plays, with OpenAI's own client."""

import asyncio
import contextlib
import dataclasses
import socket
from collections.abc import AsyncIterator

import openai

from sluice_server.services.edge.app import build
from sluice_server.services.edge.connections import Bounds
from sluice_server.services.edge.observed import HttpObserver
from sluice_server.services.edge.server import server_of
from sluice_server.services.edge.settings import HttpSettings
from sluice_server.services.gateway.settings import GatewaySettings
from tests.services.gateway.fake_ring import SETTINGS, Rig, running

HTTP = HttpSettings()
BOUNDS = Bounds(most=100, most_of_address=100)


@dataclasses.dataclass
class EdgeRig(Rig):
    """A gateway's rig, with clients of the edge in front of it."""

    client: openai.AsyncOpenAI
    url: str


@contextlib.asynccontextmanager
async def edge(
    chosen: GatewaySettings = SETTINGS,
    api_key: str = "any",
    bounds: Bounds = BOUNDS,
    http: HttpSettings = HTTP,
    observer: HttpObserver | None = None,
) -> AsyncIterator[EdgeRig]:
    async with running(chosen) as rig:
        server = server_of(build(rig.channel, http, observer, lambda: 123.0), bounds, grace_s=1)
        with socket.create_server(("127.0.0.1", 0)) as opened:
            url = f"http://127.0.0.1:{opened.getsockname()[1]}"
            task = asyncio.create_task(server.serve(sockets=[opened]))
            client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=0)
            async with client:
                yield EdgeRig(
                    **{one.name: getattr(rig, one.name) for one in dataclasses.fields(rig)}, client=client, url=url
                )
            server.should_exit = True
            await task
