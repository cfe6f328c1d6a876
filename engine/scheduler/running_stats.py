"""Running statistics: counts over the running sequences, made once per step for all candidates of admission.

Counts and predicts only; `admission` decides.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Several

from sluice_server.engine.kv_cache.cache import KVCache
from sluice_server.engine.kv_cache.table import CachedPrefix
from sluice_server.engine.scheduler.lengths import OutputLengths
from sluice_server.engine.scheduler.sequence import Sequence

Load = tuple[int, int]  # (tokens still to come, tokens held now)


class RunningStats:
    """Counts over `running`, updated by `add` as sequences are admitted."""

    def __init__(self, running: Several[Sequence], cache: KVCache, lengths: OutputLengths) -> None:
        self._cache = cache
        self._lengths = lengths
        self._running: list[Sequence] = []
        self._loads: list[Load] | None = None  # computed on first use
        self._num_blocks = 0  # of all tables: shared ones count more than once
        self.num_active = 0  # running, and not paused
        self.has_idle = False
        self.lowest_priority = 1 << 30
        for one in running:
            self.add(one)

    def add(self, sequence: Sequence) -> None:
        """Counts one more running sequence, with those that will be forked from it."""
        if sequence.is_idle:
            self.has_idle = True
        else:
            self.num_active += 1
        self.lowest_priority = min(self.lowest_priority, sequence.group.priority)
        self._num_blocks += sequence.table.num_held
        self._running.append(sequence)
        if self._loads is not None:
            self._loads += self._loads_of(sequence, 0)

    def peak_with(self, sequence: Sequence, found: CachedPrefix) -> int:
        """Returns the blocks held at the predicted common peak of all running sequences and `sequence`.

        `found`: its blocks in the prefix cache. Each sequence counts half a block more, for rounding. Blocks shared now
        are assumed to stay shared.
        """
        cache = self._cache
        if self._loads is None:
            self._loads = [load for one in self._running for load in self._loads_of(one, 0)]
        shared = cache.capacity.num_shared(found) // cache.num_groups
        loads = self._loads + self._loads_of(sequence, shared * cache.block_size)
        return cache.sizes.blocks_within(peak(loads), len(loads)) - max(0, self._num_blocks - cache.pool.num_held)

    def _loads_of(self, sequence: Sequence, shared: int) -> list[Load]:
        """Returns (tokens still to come, tokens to hold) of the sequence and of each one to be forked from it."""
        group, half = sequence.group, self._cache.block_size // 2
        end = self._lengths.likely_end(group.request.tenant, sequence.num_output, group.max_tokens)
        loads = [(max(1, end - sequence.num_output), max(0, len(sequence.tokens) - shared) + half)]
        for one in group.unforked:
            end = self._lengths.likely_end(group.request.tenant, one.num_output, group.max_tokens)
            loads.append((max(1, end - one.num_output), one.num_output + half))
        return loads


def peak(loads: Iterable[Load]) -> int:
    """Returns the most tokens that running outputs will hold together at any time.

    That is max over i of (c_1 + … + c_i + i · r_i), longest remaining first: just before output i ends, outputs 1 … i
    are alive and each has grown by r_i. Source: Past-Future scheduler (ASPLOS '25), as in LightLLM.
    """
    held = most = 0
    for i, (remaining, now) in enumerate(sorted(loads, reverse=True), 1):
        held += now
        most = max(most, held + i * remaining)
    return most
