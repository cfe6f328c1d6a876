"""Connects ranks that have a GPU each: sums over NCCL, and over memory that GPUs read of one another where they can.

Ranks find one another over the sockets of the group.
"""

import logging
import os

import torch

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.parallel.options import check_on_device
from sluice_server.engine.parallel.peer_memory import BARRED, PeerMemory, map_memory, reach_one_another
from sluice_server.engine.parallel.shape import ParallelShape, unusable
from sluice_server.engine.parallel.sums_nccl import Collectives, NcclSums, nccl_group
from sluice_server.engine.parallel.sums_symmetric import BUFFER_FLOATS, BUFFERS, SymmetricSums, is_as_gathered
from sluice_server.engine.worker.device import CudaDevice
from sluice_server.engine.worker.startup.device_support import choose_device
from sluice_server.services.config import bad_setting
from sluice_server.services.ranks.memory import RankConnections
from sluice_server.services.ranks.rendezvous import Rendezvous, RendezvousStore
from sluice_server.services.ranks.settings import START_S, RankTable

logger = logging.getLogger(__name__)

INTERFACE = "NCCL_SOCKET_IFNAME"  # of the environment: where NCCL listens
TRIAL_S = 60.0  # until a GPU that waits for others in a trial of sums gives up


def take_device(engine: EngineConfig, table: RankTable) -> torch.device:
    """Returns the device type on which ranks compute, and has this process compute on a GPU of its own if it is CUDA.

    Raises ServiceError naming the option for what ranks with GPUs do not have, and for more ranks than GPUs.
    """
    device = choose_device(engine.device)
    check_on_device(engine, device.type)
    if device.type == "cpu":
        return device
    if len(set(table.hosts)) > 1:
        text = "has several hosts: ranks with a GPU each are of one host as yet"
        raise bad_setting("rank_peers", f"{text}; give each host a service of its own, or use --device cpu")
    there = torch.cuda.device_count()
    if len(table.addresses) > there:
        text = f"{len(table.addresses)} ranks need a GPU each, and {there} can be used here"
        raise unusable("tensor_parallel_size", f"{text}: take fewer, or --device cpu")
    torch.cuda.set_device(table.rank)
    return device


def connect_devices(shape: ParallelShape, device: torch.device, rendezvous: Rendezvous) -> RankConnections:
    """Returns one rank's sums with the others. Raises ServiceError without NCCL, and RankLost if one does not come."""
    os.environ.setdefault(INTERFACE, "lo")  # NCCL asks nobody who connects: it listens where only this host reaches it
    store = RendezvousStore(rendezvous, "sums/")
    try:
        group = nccl_group(store, shape.rank, shape.tensor_size, START_S)
    except ValueError as error:
        raise unusable("tensor_parallel_size", f"{error}; or use --device cpu") from error
    sums = NcclSums(group, shape.rank, shape.tensor_size, device, shards=shape.sum_shards, timeout_s=START_S)
    sums.agree(True)  # NCCL connects with the first collective: later nobody answers what it asks the store
    sums = symmetric_where_possible(sums, group, store)
    store.close()
    return RankConnections(sums, None)


def symmetric_where_possible(sums: NcclSums, group: Collectives, store: RendezvousStore) -> NcclSums:
    """Returns sums that read the memory of the other ranks' GPUs where these can, and do in a trial; else those given.

    Every rank gets the same.
    """
    if not reach_one_another(store, sums.rank, sums.size):
        return sums
    memory: PeerMemory | None = None
    try:
        memory = map_memory(store, sums.rank, sums.size, BUFFERS * BUFFER_FLOATS)
    except RuntimeError as error:
        logger.warning("this GPU does not map the memory of the other ranks': sums go over NCCL (%s)", error)
    if not sums.agree(memory is not None) or memory is None:
        return sums
    shape = sums.rank, sums.size, sums.device
    found = SymmetricSums(group, *shape, memory, shards=sums.shards, timeout_s=TRIAL_S)
    try:
        is_well = is_as_gathered(found, sums, CudaDevice(sums.device))
    except RuntimeError as error:  # the device is lost
        text = f"GPUs do not reach one another's memory as CUDA says they do ({error}): set {BARRED}=1"
        raise unusable("tensor_parallel_size", f"{text}, or use --device cpu") from error
    if not sums.agree(is_well):
        logger.warning("what GPUs read of one another is not what was written: sums go over NCCL; %s=1 says so", BARRED)
        return sums
    found.timeout_s = sums.timeout_s
    logger.info("rank %d reads small sums from the memory of the other GPUs", sums.rank)
    return found
