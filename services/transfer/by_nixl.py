"""Lets engines of several hosts read each other's offered blocks by NIXL. Needs the extra `nixl`."""

import os

from sluice_server.services.transfer.direct_reads import Buffers, DirectReads
from sluice_server.services.transfer.links import wait_for_device
from sluice_server.services.transfer.network import NetworkCarrier
from sluice_server.services.transfer.nixl_agent import NixlAgent
from sluice_server.services.transfer.reading import WINDOW_BYTES

CHOSEN = "UCX_NET_DEVICES"  # of the environment: which devices an operator wants
WINDOWS = 4  # that buffers are there for: of transfers under way, and of those that were given up


def read_by_nixl(carrier: NetworkCarrier, name: str, place: str, block_bytes: int) -> None:
    """Has a carrier that listens at a place read blocks by NIXL, from now on, of engines that do so too. Raises
    ImportError or OSError where it cannot be used."""
    if CHOSEN not in os.environ:
        wait_for_device(place)
    buffers = Buffers(WINDOWS * max(2, WINDOW_BYTES // block_bytes), block_bytes)
    agent = NixlAgent(name, (carrier.region, buffers.region))
    carrier.read_directly(DirectReads(agent, buffers, block_bytes), agent.metadata)
