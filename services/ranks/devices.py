"""Connects ranks that have a GPU each: sums over NCCL, whose ranks find one another over the sockets of the group."""

import os

import torch

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.parallel.options import check_on_device
from sluice_server.engine.parallel.shape import ParallelShape, unusable
from sluice_server.engine.parallel.sums_nccl import NcclSums, nccl_group
from sluice_server.engine.worker.startup.device_support import choose_device
from sluice_server.services.config import bad_setting
from sluice_server.services.ranks.memory import RankConnections
from sluice_server.services.ranks.rendezvous import Rendezvous, RendezvousStore
from sluice_server.services.ranks.settings import START_S, RankTable

INTERFACE = "NCCL_SOCKET_IFNAME"  # of the environment: where NCCL listens


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
    store.close()
    return RankConnections(sums, None)
