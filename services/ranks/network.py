"""Connects the ranks of several hosts: sums over gloo where a stage is on several, over memory where it is on one."""

import logging
import tempfile

from sluice_server.engine.errors import RankLost
from sluice_server.engine.parallel.shape import ParallelShape
from sluice_server.engine.parallel.sums import LocalSums, SumsBroken, TimedSums
from sluice_server.engine.parallel.sums_gloo import GlooSums
from sluice_server.engine.parallel.sums_shared import SharedMemorySums, new_segment
from sluice_server.services.ranks.descriptors import SUFFIX, offered, receive
from sluice_server.services.ranks.memory import RankConnections
from sluice_server.services.ranks.rendezvous import Rendezvous, RendezvousStore
from sluice_server.services.ranks.settings import START_S, RankTable
from sluice_server.services.ranks.sockets import RankSockets, number_of
from sluice_server.services.ranks.stages_sockets import SocketStages

logger = logging.getLogger(__name__)

CONNECT_S = 60.0  # until ranks that have all joined must have reached one another


def connect_hosts(
    shape: ParallelShape, table: RankTable, sockets: RankSockets, rendezvous: Rendezvous, *, sum_dtype: str
) -> RankConnections:
    """Returns one rank's connections with the others. Raises RankLost if one of them cannot be reached."""
    sums = _sums(shape, table, rendezvous, sum_dtype)
    sums.timeout_s = START_S  # while the model is loaded
    if shape.pipeline_size == 1:
        return RankConnections(sums, None)
    return RankConnections(sums, SocketStages(sockets, shape, table.ids, START_S))


def _sums(shape: ParallelShape, table: RankTable, rendezvous: Rendezvous, dtype: str) -> TimedSums:
    first = shape.member - shape.rank
    hosts = table.hosts[first : first + shape.tensor_size]
    if shape.tensor_size == 1:
        return LocalSums(shape.sum_shards)
    if len(set(hosts)) == 1:
        return _sums_of_host(shape, rendezvous)
    address = number_of(hosts[shape.rank])
    store = RendezvousStore(rendezvous, f"sums/{shape.stage}/")
    logger.info("partial sums travel as %s, unencrypted, between %s", dtype, ", ".join(sorted(set(hosts))))
    sizes = shape.rank, shape.tensor_size
    try:
        return GlooSums(store, *sizes, address, shards=shape.sum_shards, dtype=dtype, timeout_s=CONNECT_S)
    except SumsBroken as error:
        others = ", ".join(host for host in sorted(set(hosts)) if host != hosts[shape.rank])
        text = f"sums need connections with {others}, and there are none within {CONNECT_S:g} s"
        raise RankLost(f"{text}: let these hosts reach each other's ports ({error})") from error


def _sums_of_host(shape: ParallelShape, rendezvous: Rendezvous) -> TimedSums:
    """Returns the sums of a stage all of whose ranks are on one host: its first rank makes their memory."""
    key, others = f"memory/{shape.stage}", shape.tensor_size - 1
    if shape.rank:
        (file,) = receive(rendezvous.wait(key).decode())
    else:
        with (
            tempfile.TemporaryDirectory(prefix="sluice-ranks-") as folder,  # of mode 0700
            offered(f"{folder}/sums{SUFFIX}") as offer,
        ):
            file = new_segment(shape.tensor_size)
            rendezvous.tell(key, offer.path.encode())
            offer.pass_on([file], others)
    return SharedMemorySums(file, shape.rank, shape.sum_shards, START_S, f" of stage {shape.stage}")
