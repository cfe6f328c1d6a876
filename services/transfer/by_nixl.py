"""Lets engines of several hosts read each other's offered blocks by NIXL. Needs the extra `nixl`."""

from sluice_server.services.transfer.direct_reads import Buffers, DirectReads
from sluice_server.services.transfer.network import NetworkCarrier
from sluice_server.services.transfer.nixl_agent import NixlAgent
from sluice_server.services.transfer.reading import WINDOW_BYTES

WINDOWS = 4  # that buffers are there for: of transfers under way, and of those that were given up


def read_by_nixl(carrier: NetworkCarrier, name: str, block_bytes: int) -> None:
    """Has a carrier read blocks by NIXL, from now on, of engines that do so too. Raises ImportError or OSError where it
    cannot be used."""
    buffers = Buffers(WINDOWS * max(2, WINDOW_BYTES // block_bytes), block_bytes)
    agent = NixlAgent(name, (carrier.region, buffers.region))
    carrier.read_directly(DirectReads(agent, buffers, block_bytes), agent.metadata)
