"""A built engine, what was decided while building it, and how it ends.

`engine.build` makes it.
"""

import contextlib
import dataclasses

from sluice_server.engine.cache_memory import CacheMemory
from sluice_server.engine.engine import Engine
from sluice_server.engine.errors import DeviceLost
from sluice_server.engine.executor.computing import Computing
from sluice_server.engine.kv_cache.block_store import BlockStore
from sluice_server.engine.kv_cache.saving import save_cache
from sluice_server.engine.kv_cache.shared_slots import SharedSlots
from sluice_server.engine.models.offload.store import OffloadFigures
from sluice_server.engine.parallel.group import Workers
from sluice_server.engine.sampling.grammars import Grammars
from sluice_server.engine.worker.host.pages import PagesAhead
from sluice_server.engine.worker.host.threads import ThreadTuner
from sluice_server.engine.worker.slots.images import EncoderCache


@dataclasses.dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine and what was decided while building it.

    Attributes:
        computing: a description of device, formats and kernels.
        num_blocks: blocks of its cache, for each group of layers.
        grammars: the grammars that outputs follow, so that the caller can compile them ahead.
        tuner: measures how many threads pay off while the engine is idle; None on CUDA.
        store: the cache's memory; None for an encoder.
        shared: memory in which other engines read its blocks; None if that is off.
        images: what it keeps of images; None for a model that takes none.
        save_s: seconds that saving the cache may take.
        offloaded: counts of weights that are not in memory; None if all are.
        workers: the other ranks of its group; None if it is of one rank.
        pages: takes that memory from the system before it is used, on a CPU.
        memory: resizes the cache while it serves; None where its size is fixed.
    """

    engine: Engine
    computing: Computing
    num_blocks: int
    grammars: Grammars
    tuner: ThreadTuner | None
    store: BlockStore | None
    pages: PagesAhead | None = None
    shared: SharedSlots | None = None
    images: EncoderCache | None = None
    memory: CacheMemory | None = None
    save_s: float = 0.0
    offloaded: OffloadFigures | None = None
    workers: Workers | None = None

    def close(self) -> None:
        """Ends the threads of the cache, and saves it in its directory if it has one. The engine must not be used
        afterwards."""
        if self.pages is not None:
            self.pages.close()
        if self.workers is not None:
            with contextlib.suppress(DeviceLost):
                self.engine.finish()  # else others wait for this rank, and do not save
        if self.store is not None:
            save_cache(self.engine.scheduler.cache, self.store, self.save_s, others=self.workers)
        if self.shared is not None:
            self.shared.close()
        if self.engine.adapters is not None:
            self.engine.adapters.close()
