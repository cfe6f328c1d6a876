"""Times decoding and prompts over ranks of one core each, beside one process with as many threads, taken in turn.

    python -m benchmarks.ranks [--shape 474M] [--format int8] [--device cpu] [--rows 1 8 32] [--rounds 5] [--only NAMES]

Ways: threads (one process), tensor (ranks that share out layers), stages (of a pipeline, with as many steps under way),
turns (the same stages, one step at a time), thread (one process with a single one); with --peers also vLLM, as one
process and over ranks, where it is installed (`benchmarks/cpu/README.md`). Tokens a second of a few steps, or of a
prompt, the best and the median of all rounds: other work on the machine slows all ways, so the best is what they
can do. Random weights: what the model says means nothing. The engines of all ways are in this process, and the number
of threads is the process's: each turn sets its way's.

From thread, threads and tensor follows what ranks of more cores would do (`forecast`).
"""

import argparse
import contextlib
import dataclasses
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import rank_peer
from benchmarks.cpu.own_worker import CONTEXT, PROMPT, SETTINGS
from benchmarks.cpu.shapes import CACHE, SHAPES, checkpoint
from sluice_server.engine.build import build_engine
from sluice_server.engine.config import EngineConfig
from sluice_server.engine.engine import Engine
from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.limits import limits_of
from sluice_server.engine.parallel.device_group import DeviceGroupRunner
from sluice_server.engine.parallel.group import GroupRunner
from sluice_server.engine.request import EngineRequest, SamplingParams
from sluice_server.engine.worker.host.compute_threads import use_threads
from sluice_server.services.checkpoint.digests import remembered
from sluice_server.services.checkpoint.model_source import CheckpointFiles, resolve_model
from sluice_server.services.config import ServiceConfig
from sluice_server.services.ranks.settings import config_of_rank
from sluice_server.services.ranks.started import started

RANKS, TOKENS, LONG_PROMPT = 2, 24, 512
PART = 4  # steps of which a rate is taken: so short a time is quiet now and then on a machine that others use
CORES = (1, 2, 4, 8, 16)  # of a rank, in the forecast
WAYS = {
    "threads": {"threads": RANKS},
    "tensor": {"threads": 1, "tensor_parallel_size": RANKS},
    "stages": {"threads": 1, "pipeline_parallel_size": RANKS},
    "turns": {"threads": 1, "pipeline_parallel_size": RANKS},
    "thread": {"threads": 1},
}
Rates = dict[tuple[str, str], list[float]]  # tokens a second, by what is done and way


@contextlib.contextmanager
def opened(way: str, directory: Path, options: argparse.Namespace) -> Iterator[Engine]:
    """An engine that computes in one of the ways."""
    form = options.format
    given = {"device": options.device, "max_num_seqs": 32, "kv_cache_tokens": 32 * CONTEXT, "prefix_caching": False}
    config = dataclasses.replace(EngineConfig(), **given, **SETTINGS[form], **WAYS[way])  # type: ignore[arg-type]
    service = ServiceConfig(model=str(directory), allow_shared_cores=True)
    model = read_config(directory)
    limits = limits_of(config, model, service.max_prompt_bytes)
    with contextlib.ExitStack() as closing:
        group = None
        if config.num_ranks > 1:
            contents = CheckpointFiles(resolve_model(service.model, ""), remembered(), with_weights=True)
            group = closing.enter_context(started(config, service, contents.configuration))
            group.depth = RANKS - 1 if way == "stages" else 0
            config = config_of_rank(config)
        built = build_engine(config, model, directory, limits, workers=group)
        yield built.engine
        built.close()


class Load:
    """Requests for one engine, which computes with so many threads of this process."""

    def __init__(self, engine: Engine, threads: int) -> None:
        self._engine = engine
        self._threads = threads
        self._count = 0

    def decode(self, rows: int) -> list[float]:
        """Returns the tokens a second of so many sequences, once all of them decode: one rate for every PART steps."""
        self._add(rows, PROMPT, TOKENS + 16)
        spoken: dict[str, int] = {}
        while len(spoken) < rows:
            self._step(spoken)
        rates = []
        for _ in range(TOKENS // PART):
            spoken.clear()
            start = time.perf_counter()
            while sum(spoken.values()) < rows * PART:
                self._step(spoken)
            rates.append(sum(spoken.values()) / (time.perf_counter() - start))
        while self._engine.has_work:
            self._engine.step()
        return rates

    def prompt(self) -> float:
        """Returns the tokens a second of one long prompt."""
        self._add(1, LONG_PROMPT, 1)
        start = time.perf_counter()
        while self._engine.has_work:
            self._engine.step()
        return LONG_PROMPT / (time.perf_counter() - start)

    def _step(self, spoken: dict[str, int]) -> None:
        for event in self._engine.step().sampled:
            spoken[event.request_id] = spoken.get(event.request_id, 0) + len(event.token_ids)

    def _add(self, num: int, prompt: int, tokens: int) -> None:
        use_threads(self._threads)
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        for i in range(num):
            self._count += 1
            ids = tuple((self._count * 131 + at * 7 + i) % 1000 + 3 for at in range(prompt))
            self._engine.add(EngineRequest(f"{self._count:032x}", ids, params))


def shares(engine: Engine) -> str:
    """Returns what part of their time ranks spent in sums, or waiting for other stages."""
    runner = engine.runner
    if not isinstance(runner, GroupRunner | DeviceGroupRunner):
        return ""
    return ", ".join(f"{one.sums_s / max(one.compute_s, 1e-9):.0%}" for one in runner.launches.times)


def forecast(best: dict[str, float], cores: int) -> tuple[float, float, float]:
    """Returns the tokens a second of ranks with so many cores each, of one process with all of these, and with those of
    one rank.

    `best` are those of thread, threads and tensor. What more threads make faster is shared out over all cores, as if
    memory could feed them. The rest of a step stays as it is, and so does what ranks take longer than as many threads:
    their sums, and their waits for each other.
    """
    one, threads, tensor = (1 / best[way] for way in ("thread", "threads", "tensor"))
    shared = min(one, (one - threads) * RANKS / (RANKS - 1))
    rest, more = one - shared, max(0.0, tensor - threads)
    together = rest + shared / cores / RANKS
    return 1 / (together + more), 1 / together, 1 / (rest + shared / cores)


def show(found: Rates, base: str) -> None:
    """Prints a table of what was measured, beside the way `base`, and a forecast if it has all that this needs."""
    for (what, way), each in found.items():
        line = f"{what:16} {way:8} best {max(each):8.1f} median {statistics.median(each):8.1f}"
        print(f"{line}   {max(each) / max(found[what, base]):5.2f} x {base}'s best")
    for what in dict.fromkeys(what for what, _ in found):
        best = {way: max(each) for (one, way), each in found.items() if one == what}
        for cores in CORES if {"thread", "threads", "tensor"} <= set(best) else ():
            ranks, all_cores, own = forecast(best, cores)
            line = f"{what:16} forecast: {RANKS} ranks of {cores:2} cores {ranks:8.1f}"
            line += f" = {ranks / own:4.2f} x one process of {cores}"
            print(f"{line}, {ranks / all_cores:4.2f} x one of {RANKS * cores}")


def main() -> None:
    """Measures all ways in turn and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="474M", choices=list(SHAPES))
    parser.add_argument("--format", default="int8", choices=list(SETTINGS))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--only", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--peers", action="store_true", help="vLLM as well, in the same turns")
    options = parser.parse_args()
    directory = checkpoint(options.shape)
    found: Rates = {}
    with contextlib.ExitStack() as closing:
        engines = {way: closing.enter_context(opened(way, directory, options)) for way in options.only}
        loads: dict[str, Load | rank_peer.RankPeer] = {
            way: Load(engine, WAYS[way]["threads"]) for way, engine in engines.items()
        }
        for ranks in (1, RANKS) if options.peers else ():
            sizes = PART, TOKENS, LONG_PROMPT
            opening = rank_peer.opened(directory, options.format, ranks, CACHE / "vllm-ranks.log", sizes)
            if (peer := closing.enter_context(opening)) is not None:
                loads["vLLM" if ranks == 1 else f"vLLM x{ranks}"] = peer
        for _ in range(options.rounds):
            for way, load in loads.items():
                for rows in options.rows:
                    found.setdefault((f"decode, {rows} rows", way), []).extend(load.decode(rows))
                found.setdefault((f"prompt of {LONG_PROMPT}", way), []).append(load.prompt())
        where = f"{RANKS} cores of {os.cpu_count()}, load {os.getloadavg()[0]:.1f}"
        print(f"{options.shape} {options.format}, {where}; tokens/s")
        for way, engine in engines.items():
            print(f"{way}: time of ranks in sums or waiting {shares(engine) or 'none'}")
    show(found, options.only[0])


if __name__ == "__main__":
    main()
