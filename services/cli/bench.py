"""`sluice bench`: a load test of a running service over gRPC, with random token ids, end-of-sequence ignored,
greedy."""

import asyncio
import copy
import itertools
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from sluice_server.services.cli import load
from sluice_server.services.cli.bench_report import load_plot, show, show_levels
from sluice_server.services.cli.connection_options import (
    ADDRESS,
    AddressOption,
    ConnectionOptions,
    TlsCaOption,
    TlsCertOption,
    TlsKeyOption,
    TlsOption,
    TokenOption,
)

if TYPE_CHECKING:
    import sluice
    from rich.progress import Progress

Samples: TypeAlias = list[load.RequestSample]

STREAMS_PER_CHANNEL = 16
MAX_CHANNELS = 64
EXIT_FAILED = 1


def bench(  # noqa: PLR0913 # a command line lists its options
    address: AddressOption = ADDRESS,
    concurrency: Annotated[int, typer.Option(envvar="SLUICE_CONCURRENCY", min=1, help="streams of a closed loop")] = 8,
    rate: Annotated[float, typer.Option(envvar="SLUICE_RATE", min=0, help="arrivals a second; 0: closed loop")] = 0.0,
    input_len: Annotated[int, typer.Option(envvar="SLUICE_INPUT_LEN", min=1, help="prompt tokens")] = 64,
    output_len: Annotated[int, typer.Option(envvar="SLUICE_OUTPUT_LEN", min=1, help="output tokens")] = 64,
    requests: Annotated[int, typer.Option(envvar="SLUICE_REQUESTS", min=1, help="requests to count")] = 64,
    warmup: Annotated[int, typer.Option(envvar="SLUICE_WARMUP", min=0, help="warm-up requests before those")] = 4,
    seed: Annotated[int, typer.Option(envvar="SLUICE_SEED", help="seed of prompts and arrivals")] = 0,
    sweep: Annotated[
        str,
        typer.Option(envvar="SLUICE_SWEEP", help="loads in turn, as 1,2,4,8: streams, or arrivals with --rate"),
    ] = "",
    plot: Annotated[
        Path | None, typer.Option(envvar="SLUICE_PLOT", help="draw latency against the loads of --sweep, as SVG")
    ] = None,
    adapter: Annotated[
        list[str] | None, typer.Option(help="adapter of requests; repeated: of them by turns, - for the model alone")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", envvar="SLUICE_JSON_FILE", help="write figures here")
    ] = None,
    tls: TlsOption = False,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    token: TokenOption = None,
) -> None:
    """Measure TTFT, ITL, TPOT and throughput of the server at ADDRESS."""
    # Imported here, so that the other commands start without them.
    import uvloop
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    levels = _levels(sweep, plot, is_rate=rate > 0)
    for flag, path in (("--json", json_file), ("--plot", plot)):
        _check_place(flag, path)
    plan = BenchPlan(address, concurrency, rate, input_len, output_len, requests, warmup, seed)
    plan.access = ConnectionOptions.of(address, tls, (tls_ca, tls_cert, tls_key), token)
    plan.adapters = tuple(adapter or ())
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    found: list[tuple[float, dict[str, object]]] = []
    with Progress(*columns, transient=True, refresh_per_second=4) as progress:
        for level in levels or [rate or concurrency]:
            samples = uvloop.run(_measure(plan.at(level) if levels else plan, progress))
            found.append((level, load.report(samples)))
    figures = {"settings": plan.settings(), **found[0][1]}
    if levels:
        figures = {"settings": plan.settings(), "levels": [{"load": level, **one} for level, one in found]}
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=2) + "\n")
    if plot is not None:
        plot.write_text(load_plot(found, "arrivals a second" if rate else "concurrent streams"))
    if levels:
        show_levels(found)
    else:
        show(found[0][1])
    if any(one["errors"] for _, one in found):
        raise typer.Exit(EXIT_FAILED)


def _levels(sweep: str, plot: Path | None, *, is_rate: bool) -> list[float]:
    """Returns the loads, ascending. Raises BadParameter for an invalid list."""
    try:
        levels = sorted(float(one) for one in sweep.split(",") if one)
    except ValueError:
        levels = [0.0]
    if levels and levels[0] <= 0:
        raise typer.BadParameter(f"--sweep: {sweep!r} is no list of numbers above 0, such as 1,2,4,8")
    if not is_rate and any(level != int(level) for level in levels):
        raise typer.BadParameter(f"--sweep: {sweep!r} has part of a stream: give whole numbers, or --rate for arrivals")
    if plot is not None and not levels:
        raise typer.BadParameter("--plot draws the loads of --sweep: give both")
    return levels


def _check_place(flag: str, path: Path | None) -> None:
    """Check before the load test that its figures can be written. Raises BadParameter."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        what = "is a directory" if path.is_dir() else f"there is no directory {path.parent}"
        raise typer.BadParameter(f"{flag} {path}: {what}; give the name of a file to write")


class BenchPlan:
    """The requests of a load test: their number and lengths, and the load."""

    def __init__(  # noqa: PLR0913 # the options of one command
        self,
        address: str,
        concurrency: int,
        rate: float,
        input_len: int,
        output_len: int,
        requests: int,
        warmup: int,
        seed: int,
    ) -> None:
        self.address = address
        self.access = ConnectionOptions()
        self.adapters: tuple[str, ...] = ()
        self._turns = itertools.count()
        self.concurrency = concurrency if not rate else requests
        self.rate = rate
        self.input_len = input_len
        self.output_len = output_len
        self.requests = requests
        self.warmup = warmup
        self.seed = seed

    def at(self, level: float) -> "BenchPlan":
        """Returns the plan under another load: arrivals per second of an open loop, streams of a closed loop."""
        other = copy.copy(self)
        if self.rate:
            other.rate = level
        else:
            other.concurrency = int(level)
        other.seed += round(level * 1000)  # other prompts, as equal ones would hit the prefix cache
        return other

    def next_adapter(self) -> str | None:
        """Returns the adapter of the next request; None for the model alone."""
        if not self.adapters:
            return None
        found = self.adapters[next(self._turns) % len(self.adapters)]
        return None if found == "-" else found

    def settings(self) -> dict[str, object]:
        """Returns the settings for the result file."""
        return {name: value for name, value in vars(self).items() if name not in ("access", "_turns")}


async def _measure(plan: BenchPlan, progress: "Progress") -> list[load.RequestSample]:
    import sluice

    from sluice_server.services.cli.client import aio_client, describe

    num_channels = min(-(-plan.concurrency // STREAMS_PER_CHANNEL), MAX_CHANNELS)
    # No retries: failures are part of the result.
    async with aio_client(plan.address, plan.access, num_channels, sluice.NEVER) as client:
        try:
            vocab = (await client.models(timeout_s=10))[0].vocab_size
        except sluice.SluiceError as error:
            print(f"error: {describe(error, plan.address)}", file=sys.stderr)
            raise typer.Exit(EXIT_FAILED) from error
        rng = random.Random(plan.seed)
        prompts = [load.random_prompt(rng, vocab, plan.input_len) for _ in range(plan.warmup + plan.requests)]
        warm = progress.add_task("warm-up", total=plan.warmup)
        await _closed_loop(plan, client, prompts[: plan.warmup], lambda: progress.advance(warm))
        task = progress.add_task("requests", total=plan.requests)
        run = _open_loop if plan.rate else _closed_loop
        return await run(plan, client, prompts[plan.warmup :], lambda: progress.advance(task))


async def _closed_loop(
    plan: BenchPlan, client: "sluice.AsyncClient", prompts: list[list[int]], done: Callable[[], None]
) -> Samples:
    """Run `concurrency` workers, each of which sends its next request when the last one has ended."""
    waiting = list(reversed(prompts))
    samples: Samples = []

    async def work() -> None:
        while waiting:
            samples.append(await _one(plan, client, waiting.pop()))
            done()

    await asyncio.gather(*(work() for _ in range(min(plan.concurrency, len(prompts)))))
    return samples


async def _open_loop(
    plan: BenchPlan, client: "sluice.AsyncClient", prompts: list[list[int]], done: Callable[[], None]
) -> Samples:
    """Send requests at their arrival times, however many are still running."""
    times = load.arrival_times(len(prompts), plan.rate, plan.seed)

    async def send(number: int) -> load.RequestSample:
        await asyncio.sleep(times[number])
        sample = await _one(plan, client, prompts[number])
        done()
        return sample

    return list(await asyncio.gather(*(send(number) for number in range(len(prompts)))))


async def _one(plan: BenchPlan, client: "sluice.AsyncClient", prompt: list[int]) -> load.RequestSample:
    """Send one request and record when its messages arrive."""
    import sluice

    options: sluice.GenerateOptions = {
        "max_tokens": plan.output_len,
        "temperature": 0.0,
        "ignore_eos": True,
        "token_records": False,
    }
    if (adapter := plan.next_adapter()) is not None:
        options["adapter"] = adapter
    start = time.perf_counter()
    arrivals: list[tuple[float, int]] = []
    try:
        async for delta in client.stream(prompt, **options):
            arrivals.append((time.perf_counter(), delta.consumed))
    except sluice.SluiceError as error:
        return load.RequestSample(start, tuple(arrivals), time.perf_counter(), error.code.name, error.message)
    return load.RequestSample(start, tuple(arrivals), time.perf_counter())
