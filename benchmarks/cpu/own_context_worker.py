"""This engine's decode step behind long contexts, and its prefill; answers one JSON line for each it reads.

    python -m benchmarks.cpu.own_context_worker CHECKPOINT CACHE_DTYPE LONGEST

Weights are in float32. Contexts are not computed: cache blocks are imported as from another engine, each a copy of one
that was computed. A step is all of the engine: scheduler, cache, forward, sampler.
"""

import dataclasses
import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.cpu.own_worker import THREADS, timed
from sluice_server.engine.build import build_engine
from sluice_server.engine.built import BuiltEngine
from sluice_server.engine.config import EngineConfig
from sluice_server.engine.kv_cache.prefix import names_of
from sluice_server.engine.kv_cache.shared_slots import ReadSlots
from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.limits import limits_of
from sluice_server.engine.request import EngineRequest, SamplingParams
from sluice_server.engine.scheduler.validation import salt_of
from sluice_server.engine.transfer import BlockFetcher

ROWS = 8
BLOCK = 32
SAMPLES = 64  # blocks that are computed, whose copies fill the contexts
OFFERED_BYTES = 1 << 26
MARGIN = 512  # tokens of each row behind its context


class CopiedBlocks:
    """A source that has every block that is asked for: copies of a few."""

    def __init__(self, blocks: Sequence[bytes]) -> None:
        self._blocks = blocks

    def find(self, names: Sequence[bytes], end_s: float) -> Mapping[bytes, Callable[[], bytes | None]]:
        """All of them."""
        return {name: lambda at=at: self._blocks[at % len(self._blocks)] for at, name in enumerate(names)}  # type: ignore[misc] # of lambdas

    def begin(self, names: Sequence[bytes], end_s: float) -> None:
        """Nothing is awaited."""

    def release(self, names: Sequence[bytes]) -> None:
        """Nothing is leased."""

    def clear(self, owner: bytes) -> bool:
        """Nothing is kept."""
        return True

    def take_released(self) -> Sequence[bytes]:
        """None."""
        return ()


class OwnContexts:
    """Our engine, with a cache in which eight rows of the longest context fit."""

    def __init__(self, directory: Path, cache_dtype: str, longest: int) -> None:
        config = EngineConfig(
            device="cpu",
            dtype="float32",
            kv_cache_dtype=cache_dtype,
            max_num_seqs=ROWS,
            threads=THREADS,
            block_size=BLOCK,
            kv_cache_tokens=ROWS * (longest + MARGIN) + SAMPLES * BLOCK + longest,
            shared_cache_bytes=OFFERED_BYTES,
        )
        model = read_config(directory)
        self.built = build_engine(config, model, directory, limits_of(config, model, 1 << 20))
        self.about = f"{self.built.computing.kernels} float32, cache in {self.built.computing.cache_dtype}"
        self._engine, self._count, self._vocab = self.built.engine, 0, model.vocab_size
        self._rows = [self._ids(row, longest + 1) for row in range(ROWS)]
        assert self.built.store is not None
        source = CopiedBlocks(self._samples(self.built))
        self._fetcher = BlockFetcher(self._engine, source, self.built.store.fill, lambda: 0.0)  # no fetch is too slow

    def decode(self, context: int, rows: int, steps: int, *, shared: bool) -> list[float]:
        """Seconds of steps with a context of so many tokens; `shared`: one that all rows have in common."""
        requests = []
        for row in range(rows):
            ids = (*self._rows[0][:context], row + 3) if shared else self._rows[row][: context + 1]
            requests.append(self._request(ids, steps + 8))
            self._fetcher.fetch(requests[-1])
            self._engine.add(requests[-1])
        cached: dict[str, int] = {}
        while len(cached) < rows:
            for event in self._engine.step().sampled:
                assert event.admission is not None
                cached[event.request_id] = event.admission.num_cached
        assert min(cached.values()) == context // BLOCK * BLOCK, cached  # nothing is timed that computes a prompt
        took = [timed(self._engine.step) for _ in range(steps)]
        for request in requests:
            self._engine.cancel(request.request_id)
        return took

    def prefill(self, num: int) -> list[float]:
        """Seconds until a prompt of so many tokens, which has nothing in common with others, has its first token."""
        self._engine.add(self._request(self._ids(1000 + self._count, num), 1))
        return [timed(self._finish)]

    def _samples(self, built: BuiltEngine) -> list[bytes]:
        """The bytes of blocks that are computed here, by the way that another engine would read them."""
        request = self._request(self._ids(ROWS, SAMPLES * BLOCK + 1), 1)
        self._engine.add(request)
        self._finish()
        assert built.shared is not None and built.store is not None
        memory = ReadSlots(built.shared.file, built.store.block_bytes, built.store.layout)
        found = memory.find(names_of(salt_of(request), request.prompt_ids, BLOCK))
        blocks = [block for place in found.values() if (block := memory.read(place)) is not None]
        assert blocks, "no block was offered"
        return blocks

    def _ids(self, seed: int, num: int) -> tuple[int, ...]:
        return tuple(random.Random(seed).choices(range(3, self._vocab), k=num))

    def _request(self, ids: tuple[int, ...], num: int) -> EngineRequest:
        self._count += 1
        params = SamplingParams(max_tokens=num, temperature=0.0, ignore_eos=True)
        return EngineRequest(f"{self._count:032x}", ids, params, cache_salt=b"b" * 32)

    def _finish(self) -> None:
        while self._engine.has_work:
            self._engine.step()


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """A line of the input."""

    what: str
    context: int
    rows: int = 1
    steps: int = 1


def main() -> None:
    """Answer until the input ends."""
    directory, cache_dtype, longest = sys.argv[1:]
    worker = OwnContexts(Path(directory), cache_dtype, int(longest))
    print(json.dumps({"ready": True, "about": worker.about}), flush=True)
    for line in sys.stdin:
        asked = Asked(**json.loads(line))
        if asked.what == "prefill":
            took = worker.prefill(asked.context)
        else:
            took = worker.decode(asked.context, asked.rows, asked.steps, shared=asked.what == "shared")
        print(json.dumps({"seconds": took}), flush=True)


if __name__ == "__main__":
    main()
