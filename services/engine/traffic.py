"""Counts what the size of the cache's blocks depends on: how far prompts begin as others did, and what is unused.

Beginnings are compared in grains, by hashes of tokens that are kept in this process alone; the oldest go first.
"""

import contextlib
import functools
import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

from sluice_server.engine.built import BuiltEngine
from sluice_server.engine.kv_cache.block_size import GRAIN, NUM_ENDS, Traffic
from sluice_server.engine.request import EngineRequest
from sluice_server.engine.scheduler.events import Sampled
from sluice_server.engine.scheduler.validation import salt_of
from sluice_server.services.engine.stage import EngineStage
from sluice_server.services.process import traffic_files
from sluice_server.services.process.process import Process

logger = logging.getLogger(__name__)

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
MAX_GRAINS = 1 << 16  # whose hashes are kept
MAX_OUTPUTS = 4096  # that are followed at a time
WRITE_BEATS = 120  # heartbeats between two writes of the file


class TrafficMeter:
    """Counts the requests of one engine."""

    def __init__(self, built: BuiltEngine) -> None:
        self._built = built
        self._seen: OrderedDict[int, None] = OrderedDict()  # grains, each with all that is before it
        self._prompts: OrderedDict[str, list[int]] = OrderedDict()  # of requests: hash of whole grains, then the rest
        self._outputs: OrderedDict[tuple[str, int], list[int]] = OrderedDict()
        self._ends = [0] * NUM_ENDS
        self._num_requests = 0
        self._num_tokens = 0
        self._unused = 0.0  # sum over looks
        self._num_looks = 0

    def take(self, request: EngineRequest) -> None:
        """Counts a request that is to be computed."""
        self._num_requests += 1
        self._num_tokens += len(request.prompt_ids)
        if request.bypasses_cache:
            return
        images = tuple(image.digest for image in request.images)
        chain, tokens = hash((salt_of(request), images)), request.prompt_ids
        num_seen, goes_on = 0, True
        for at in range(0, len(tokens) - GRAIN + 1, GRAIN):
            chain = hash((chain, tokens[at : at + GRAIN]))
            goes_on = goes_on and chain in self._seen
            num_seen += goes_on
            self._add(chain)
        num_seen = min(num_seen, (len(tokens) - 1) // GRAIN)  # the last token is computed in any case
        if num_seen:
            self._ends[num_seen % NUM_ENDS] += 1
        _keep(self._prompts, request.request_id, [chain, *tokens[len(tokens) // GRAIN * GRAIN :]])

    def follow(self, sampled: Sampled) -> None:
        """Counts tokens of an output: what comes after may begin with them."""
        self._num_tokens += len(sampled.token_ids)
        key = sampled.request_id, sampled.output_index
        state = self._outputs.get(key)
        if state is None:
            if sampled.request_id not in self._prompts:
                return
            state = [*self._prompts[sampled.request_id]]
            _keep(self._outputs, key, state)
        state += sampled.token_ids
        while len(state) > GRAIN:
            state[: GRAIN + 1] = [hash((state[0], tuple(state[1 : GRAIN + 1])))]
            self._add(state[0])
        if sampled.finish is not None:
            del self._outputs[key]
        if sampled.is_last:
            self._prompts.pop(sampled.request_id, None)

    def look(self) -> None:
        """Counts the slots that are unused now, while there are sequences."""
        scheduler = self._built.engine.scheduler
        if scheduler.num_running:
            cache = scheduler.cache
            slots = cache.pool.num_blocks // cache.num_groups * cache.block_size
            self._unused += scheduler.resizer.num_unused_slots / max(1, slots)
            self._num_looks += 1

    def traffic(self) -> Traffic:
        """Returns what was counted since the start."""
        engine, store = self._built.engine, self._built.store
        cache, stats = engine.scheduler.cache, engine.stats
        return Traffic(
            cache.block_size,
            0 if store is None else store.block_bytes,
            self._num_requests,
            self._num_tokens,
            tuple(self._ends),
            min(1.0, self._unused / max(1, self._num_looks)),
            cache.stats.hit_tokens,
            engine.scheduler.num_recomputed,
            cache.stats.evictions,
            stats.step_times.snapshot().total / max(1, stats.num_tokens),
        )

    def _add(self, grain: int) -> None:
        _keep(self._seen, grain, None, MAX_GRAINS)


class TrafficKeeper:
    """Writes what a meter counted, now and then and at the end; a failure is one line in the log."""

    def __init__(self, meter: TrafficMeter, write: Callable[[Traffic], None]) -> None:
        """`write` may raise OSError."""
        self._meter = meter
        self._write = write
        self._num_beats = 0
        self._has_failed = False

    def beat(self) -> None:
        """Looks at the cache; to be called at each heartbeat."""
        self._meter.look()
        self._num_beats += 1
        if self._num_beats % WRITE_BEATS == 0:
            self.keep()

    def keep(self) -> None:
        """Writes the file, if there was any request."""
        traffic = self._meter.traffic()
        if not traffic.num_requests or self._has_failed:
            return
        try:
            self._write(traffic)
        except OSError as error:
            self._has_failed = True
            logger.warning("what the block size is chosen by is not kept: %s", error)


def measure(process: Process, built: BuiltEngine, stage: EngineStage, closing: contextlib.ExitStack) -> None:
    """Has an engine's traffic counted and kept, where its supervisor chooses a block size by it at the next start."""
    if not process.config.traffic_file or built.store is None:
        return
    meter, before = TrafficMeter(built), stage.on_add
    write = functools.partial(traffic_files.write, process.config.traffic_file, process.ring.process_id)
    keeper = TrafficKeeper(meter, write)

    def take(request: EngineRequest) -> None:
        meter.take(request)
        before(request)

    stage.on_add, stage.on_sampled = take, meter.follow
    process.on_beat.append(keeper.beat)
    closing.callback(keeper.keep)


def _keep(kept: OrderedDict[_Key, _Value], key: _Key, value: _Value, most: int = MAX_OUTPUTS) -> None:
    """Puts a value last; the first go where there are more than `most`."""
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > most:
        kept.popitem(last=False)
