"""`sluice top`: a live view of a service: requests, batch, cache and speed of each engine, open requests by tenant.

Draws the answers of WatchLoad as they come. `view` is pure: it draws from two answers.
"""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

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
    from google.protobuf.duration_pb2 import Duration
    from rich.console import Group
    from rich.table import Table
    from sluice.v1 import control_pb2

EXIT_FAILED = 1
BAR = 20  # characters
STALE_S = 2.0  # an engine reports four times a second


def top(  # noqa: PLR0913 # a command line lists its options
    address: AddressOption = ADDRESS,
    interval: Annotated[
        float, typer.Option(envvar="SLUICE_INTERVAL", min=0.1, max=3600, help="seconds between updates")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", envvar="SLUICE_ONCE", help="print the load once and exit")] = False,
    tls: TlsOption = False,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    token: TokenOption = None,
) -> None:
    """Watch the server at ADDRESS; Ctrl-C ends it. With an access file it needs a key of scope control or admin."""
    # Imported here, so that the other commands start without them.
    import sluice
    from rich.console import Console
    from rich.live import Live

    from sluice_server.services.cli.client import client, describe

    console = Console()
    access = ConnectionOptions.of(address, tls, (tls_ca, tls_cert, tls_key), token)
    with client(address, access) as opened, contextlib.closing(opened.watch_load(interval)) as loads:
        try:
            if once:
                console.print(view(address, next(loads), None, interval))
                return
            before: control_pb2.Load | None = None
            live = Live(console=console, screen=True, auto_refresh=False) if console.is_terminal else None
            with live or contextlib.nullcontext():
                for load in loads:
                    shown = view(address, load, before, interval)
                    if live is None:  # a file or a pipe: one view below the other
                        console.print(shown)
                        console.file.flush()
                    else:
                        live.update(shown, refresh=True)
                    before = load
        except sluice.SluiceError as error:
            typer.echo(f"error: {describe(error, address)}", err=True)
            raise typer.Exit(EXIT_FAILED) from None
        except KeyboardInterrupt:
            return


def view(address: str, load: "control_pb2.Load", before: "control_pb2.Load | None", interval_s: float) -> "Group":
    """Returns the view of `load`; rates are since `before`, `interval_s` earlier."""
    from rich.console import Group
    from rich.text import Text

    line = Text.assemble(
        ("sluice ", "bold"),
        address,
        f"   open {load.open_requests}/{load.max_open_requests} {bar(load.open_requests, load.max_open_requests)}",
        f"   reserved {load.reserved_tokens:,} of {load.max_reserved_tokens:,} tokens",
    )
    earlier = {engine.engine_id: engine for engine in before.engines} if before is not None else {}
    return Group(line, _engines(load, earlier, interval_s), *_ranks(load, earlier, interval_s), _tenants(load))


def bar(part: float, whole: float) -> str:
    """Returns a share as a bar of blocks; an empty bar if `whole` is 0."""
    full = round(BAR * min(1.0, part / whole)) if whole > 0 else 0
    return "█" * full + "░" * (BAR - full)


def _engines(load: "control_pb2.Load", before: "dict[str, control_pb2.EngineLoad]", interval_s: float) -> "Table":
    from rich.table import Table

    from sluice_server.services.cli.client import seconds

    columns = (
        "engine",
        "running",
        "waiting",
        "cache",
        "prompt found",
        "step ms",
        "tokens/s",
        "preempted/s",
        "sent for",
    )
    table = Table(*columns, expand=True, box=None, header_style="bold")
    table.columns[0].min_width = max((len(engine.engine_id) for engine in load.engines), default=0)
    for engine in load.engines:
        was = before.get(engine.engine_id, engine)
        used = engine.total_blocks - engine.free_blocks
        queried = engine.prefix_query_tokens - was.prefix_query_tokens
        hit = engine.prefix_hit_tokens - was.prefix_hit_tokens
        share = used / engine.total_blocks if engine.total_blocks else 0.0
        age_s = seconds(engine.age)
        table.add_row(
            engine.engine_id + _state(engine, age_s) + _memory(engine.memory_level),
            str(engine.running_requests),
            str(engine.waiting_requests),
            f"{bar(used, engine.total_blocks)} {share:.0%}",
            f"{hit / queried:.0%}" if queried > 0 else "–",
            f"{seconds(engine.step_time) * 1e3:.1f}",
            f"{engine.tokens_per_second:,.0f}",
            f"{max(0, engine.preemptions - was.preemptions) / interval_s:.1f}",
            _sent_for(engine, was),
            style="red" if age_s > STALE_S else "",
        )
    return table


def _ranks(
    load: "control_pb2.Load", before: "dict[str, control_pb2.EngineLoad]", interval_s: float
) -> "Iterator[Table]":
    """Yields a table of the ranks of groups, if there are any: what they compute, and how long they wait."""
    from rich.table import Table

    if not any(engine.ranks for engine in load.engines):
        return
    table = Table("rank", "computing", "", "in sums", "", expand=True, box=None, header_style="bold")
    for engine in load.engines:
        was = before.get(engine.engine_id)
        for rank, times in enumerate(engine.ranks):
            earlier = was.ranks[rank] if was is not None and rank < len(was.ranks) else None
            steps_s = _since(times.step_time, earlier and earlier.step_time)
            sums_s = _since(times.sum_time, earlier and earlier.sum_time)
            whole_s = interval_s if earlier is not None else steps_s
            cells = [
                (bar(part, whole_s), f"{part / whole_s:.0%}" if whole_s else "–") for part in (steps_s - sums_s, sums_s)
            ]
            table.add_row(f"{engine.engine_id} rank {rank}", *cells[0], *cells[1])
    yield table


def _since(now: "Duration", before: "Duration | None") -> float:
    """Returns the seconds since an earlier answer, or all where there is none: its engine may have started anew."""
    from sluice_server.services.cli.client import seconds

    return max(0.0, seconds(now) - (seconds(before) if before is not None else 0.0))


def _memory(level: "control_pb2.MemoryLevel.ValueType") -> str:
    """Returns how short memory is, in brackets; nothing if it is not."""
    return {2: " (memory short)", 3: " (memory critical)"}.get(level, "")


def _state(engine: "control_pb2.EngineLoad", age_s: float) -> str:
    """Returns why an engine gets no requests; "" if it does."""
    from sluice.v1 import control_pb2

    if age_s > STALE_S:
        return f" (silent {age_s:.0f} s)"
    if engine.refusal:
        return f" (refused: {engine.refusal})"
    if engine.state == control_pb2.ENGINE_STATE_NOT_SERVING:
        return " (not serving)"
    return " (draining)" if engine.state == control_pb2.ENGINE_STATE_DRAINING else ""


def _sent_for(engine: "control_pb2.EngineLoad", was: "control_pb2.EngineLoad") -> str:
    """Returns why requests were sent to an engine since the answer before, or since the start without one."""
    before = was.routed if was is not engine else {}
    news = {why: num - before.get(why, 0) for why, num in engine.routed.items()}
    return " ".join(f"{why} {num}" for why, num in sorted(news.items()) if num > 0) or "–"


def _tenants(load: "control_pb2.Load") -> "Table":
    from rich.table import Table

    table = Table("tenant", "open", "reserved tokens", "", expand=True, box=None, header_style="bold")
    for tenant in load.tenants:
        share = bar(tenant.open_requests, load.open_requests)
        table.add_row(tenant.tenant or "others", str(tenant.open_requests), f"{tenant.reserved_tokens:,}", share)
    return table
