"""The load of this gateway and of the engines behind it: open requests, and the latest report of each engine."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

from sluice.v1 import control_pb2

from sluice_server.services.gateway.contract.durations import to_duration
from sluice_server.services.gateway.requests.books import Books
from sluice_server.services.gateway.requests.engines import Engines
from sluice_server.services.gateway.requests.manager import RequestManager
from sluice_server.services.gateway.requests.open_request import OpenRequest
from sluice_server.services.memory.level import Level
from sluice_server.services.messages.processes import Report

MAX_TENANTS = 64
FRESH_S = 5.0  # age of a report whose memory level counts
MEMORY_LEVELS = {
    Level.OK: control_pb2.MEMORY_LEVEL_OK,
    Level.WARN: control_pb2.MEMORY_LEVEL_WARN,
    Level.CRITICAL: control_pb2.MEMORY_LEVEL_CRITICAL,
}
MAX_REFUSAL = 256  # characters
MAX_RANKS = 1024  # of an engine that are told


@dataclasses.dataclass(frozen=True, slots=True)
class EngineReport:
    """A report, and when it arrived by the gateway's clock."""

    report: Report
    at_s: float


class Loads:
    """The latest report of each engine, by engine id."""

    def __init__(
        self, manager: RequestManager, adapters_of: Callable[[str], Iterable[control_pb2.AdapterLoad]] = lambda _: ()
    ) -> None:
        """`adapters_of` returns the adapters of an engine."""
        self._manager = manager
        self._adapters_of = adapters_of
        self._heard: dict[str, EngineReport] = {}
        self.own_level: Callable[[], Level] = lambda: Level.OK  # how short memory is at this gateway

    def report(self, report: Report) -> None:
        """Stores an engine's report."""
        self._heard[report.engine_id] = EngineReport(report, self._manager.clock())

    def left(self, names: Iterable[str]) -> None:
        """Forgets engines that are no longer in the ring."""
        for name in names:
            self._heard.pop(name, None)

    @property
    def any_report(self) -> Report | None:
        """The report of the first engine by id, or None; all engines serve the same model."""
        return next((heard.report for _, heard in sorted(self._heard.items())), None)

    def engines(self) -> list[control_pb2.EngineInfo]:
        """Returns how each engine computes: device, kernels, dtype."""
        return [_engine_info(heard.report) for _, heard in sorted(self._heard.items())]

    @property
    def step_s(self) -> float:
        """The longest recent step of any engine, in seconds; 0 without a report."""
        return max((heard.report.load.step_s for heard in self._heard.values()), default=0.0)

    def memory_level(self, own: Level) -> Level:
        """Returns how short memory is: at this gateway, or at the engine that has most left."""
        now_s = self._manager.clock()
        heard = [one.report.memory_level for one in self._heard.values() if now_s - one.at_s < FRESH_S]
        return max(own, _level(min(heard, default=0)))

    def _engine_load(self, heard: EngineReport, now_s: float) -> control_pb2.EngineLoad:
        """Returns the load of an engine, and what this gateway sends to it."""
        name, engines = heard.report.engine_id, self._manager.engines
        load = _engine_load(heard, now_s, self._adapters_of(name))
        load.state = state_of(engines, name)
        load.refusal = engines.refused.get(name, "")[:MAX_REFUSAL]
        load.open_requests = engines.load_of(name)
        load.routed.update({str(reason): num for (engine, reason), num in engines.routed.items() if engine == name})
        return load

    def of_engines(self) -> list[control_pb2.EngineLoad]:
        """Returns the load of each engine as it last reported it."""
        now_s = self._manager.clock()
        return [self._engine_load(one, now_s) for _, one in sorted(self._heard.items())]

    def requests(self) -> Iterator[OpenRequest]:
        """Returns the open requests."""
        return iter(self._manager.requests)

    def now(self) -> control_pb2.Load:
        """Returns the present load of a gateway with this model alone."""
        return whole_load(self._manager.books, [self])


def whole_load(books: Books, loads: Sequence[Loads]) -> control_pb2.Load:
    """Returns the present load of a gateway with these models as a message of the contract."""
    admission = books.admission
    return control_pb2.Load(
        open_requests=admission.num_requests,
        max_open_requests=admission.max_requests,
        reserved_tokens=admission.num_tokens,
        max_reserved_tokens=admission.max_tokens,
        engines=[engine for one in loads for engine in one.of_engines()],
        tenants=tenants_of(request for one in loads for request in one.requests()),
        memory_level=MEMORY_LEVELS[max((one.own_level() for one in loads), default=Level.OK)],
    )


def tenants_of(requests: Iterable[OpenRequest]) -> list[control_pb2.TenantLoad]:
    """Returns the open requests and reserved tokens of each tenant, largest first. At most `MAX_TENANTS` entries: the
    last sums up all further tenants, without a name."""
    sums: dict[str, control_pb2.TenantLoad] = {}
    for request in requests:
        if request.is_own:
            continue
        tenant = request.envelope.tenant
        load = sums.setdefault(tenant, control_pb2.TenantLoad(tenant=tenant))
        load.open_requests += 1
        load.reserved_tokens += request.accounting.reserved
    loads = sorted(sums.values(), key=lambda load: (-load.open_requests, load.tenant))
    shown, others = loads[: MAX_TENANTS - 1], loads[MAX_TENANTS - 1 :]
    if len(others) < 2:
        return loads
    num, reserved = (
        sum(values) for values in zip(*((one.open_requests, one.reserved_tokens) for one in others), strict=True)
    )
    return [*shown, control_pb2.TenantLoad(open_requests=num, reserved_tokens=reserved)]


def _level(number: int) -> Level:
    """Returns the level of a report."""
    return Level(min(max(number, Level.OK), Level.CRITICAL))


def state_of(engines: Engines, name: str) -> "control_pb2.EngineState.ValueType":
    """Returns whether an engine gets requests of this gateway."""
    if name not in engines.serving:
        return control_pb2.ENGINE_STATE_NOT_SERVING
    return control_pb2.ENGINE_STATE_DRAINING if name in engines.draining else control_pb2.ENGINE_STATE_SERVING


def _engine_load(
    heard: EngineReport, now_s: float, adapters: Iterable[control_pb2.AdapterLoad]
) -> control_pb2.EngineLoad:
    load = heard.report.load
    return control_pb2.EngineLoad(
        engine_id=heard.report.engine_id,
        waiting_requests=load.num_waiting,
        running_requests=load.num_running,
        total_blocks=load.num_blocks,
        free_blocks=load.num_free_blocks,
        block_size=load.block_size,
        step_time=to_duration(load.step_s),
        tokens_per_second=load.tokens_per_s,
        preemptions=load.num_preemptions,
        prefix_hit_tokens=load.prefix_hit_tokens,
        prefix_query_tokens=load.prefix_query_tokens,
        age=to_duration(now_s - heard.at_s),
        memory_level=MEMORY_LEVELS[_level(heard.report.memory_level)],
        ranks=[
            control_pb2.RankLoad(step_time=to_duration(one.steps_s), sum_time=to_duration(one.sums_s))
            for one in load.ranks[:MAX_RANKS]
        ],
        adapters=adapters,
    )


def _engine_info(report: Report) -> control_pb2.EngineInfo:
    how = report.computing
    return control_pb2.EngineInfo(
        engine_id=report.engine_id,
        device=how.device,
        mode=how.mode,
        kernels=how.kernels,
        instruction_set=how.instruction_set,
        dtype=how.dtype,
        quantization=how.quantization,
        kv_cache_dtype=how.cache_dtype,
        threads=how.threads,
        allocator=how.allocator,
        notes=how.notes,
    )
