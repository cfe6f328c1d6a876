"""Many cells and their clients in simulated time. Clients choose a cell as the SDK does."""

import dataclasses
import heapq
import itertools
import random
from collections.abc import Callable, Sequence

import grpc
from sluice.balance import INTERVAL_S, Balance
from sluice.errors import SluiceError

from benchmarks.fleet.cell import REPORT_S, Cell, CellKind
from benchmarks.fleet.engine import SALT
from benchmarks.fleet.loads import Job, Load
from sluice_server.engine.errors import ServiceError
from sluice_server.engine.kv_cache.prefix import names_of
from sluice_server.engine.request import EngineRequest, SamplingParams
from sluice_server.engine.scheduler.events import Sampled

HOP_S = 0.005  # from a client to an engine, and back: assumed; tokenizing included
NOTICE_S = 0.05  # until a client notices that its cell is lost: its connections are reset
RETRY_S = 0.05  # the first pause of the SDK
NUM_CLIENTS = 64


@dataclasses.dataclass(slots=True)
class Following:
    """A request, as its client sees it."""

    number: int
    job: Job
    client: int
    names: list[bytes] = dataclasses.field(default_factory=list)
    is_admitted: bool = False
    cell: int = -1
    engine: str = ""
    attempt: int = 0
    tokens: list[int] = dataclasses.field(default_factory=list)
    num_cached: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    gap_s: float = 0.0  # the longest between two arrivals of tokens
    num_refused: int = 0
    is_moved: bool = False  # its cell was lost
    is_done: bool = False

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.first_s - self.job.at_s

    @property
    def tpot_s(self) -> float:
        """Seconds for each token behind the first."""
        return (self.last_s - self.first_s) / max(1, len(self.tokens) - 1)

    @property
    def end_to_end_s(self) -> float:
        """Seconds to the last token."""
        return self.last_s - self.job.at_s


class Simulation:
    """A run. `play` returns all requests, in the order of their arrival."""

    def __init__(
        self, kind: CellKind, num_cells: int, load: Load, *, lost_at_s: float | None = None, hop_s: float = HOP_S
    ) -> None:
        """`lost_at_s`: when the first cell is lost. `hop_s`: from a client to an engine, and back."""
        self._hop_s = hop_s
        self.cells = [Cell(kind, load.block_size, number) for number in range(num_cells)]
        self._kind = kind
        self._load = load
        self._rng = random.Random(1)
        self._balances = [Balance(num_cells) for _ in range(NUM_CLIENTS if num_cells > 1 else 1)]
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self._open: dict[str, Following] = {}
        self._num_left = len(load.jobs)
        self.following = [
            Following(number, job, self._rng.randrange(len(self._balances))) for number, job in enumerate(load.jobs)
        ]
        for one in self.following:
            self._at(one.job.at_s, self._caller(self._send, one))
        for number, cell in enumerate(self.cells):
            for name in cell.engines:
                self._at(self._rng.random() * REPORT_S, self._caller(self._report, cell, name))
            for balance in self._balances if num_cells > 1 else []:
                self._at(self._rng.random() * INTERVAL_S, self._caller(self._tell, number, balance))
        if lost_at_s is not None:
            self._at(lost_at_s, self._lose)

    def play(self) -> list[Following]:
        """Runs until every request has ended."""
        while self._num_left:
            now, _, call = heapq.heappop(self._events)
            call(now)
        return self.following

    def _at(self, at_s: float, call: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), call))

    @staticmethod
    def _caller(call: Callable[..., None], *arguments: object) -> Callable[[float], None]:
        return lambda now: call(now, *arguments)

    def _send(self, now: float, one: Following) -> None:
        """A client sends a request, or the rest of one whose cell was lost."""
        balance = self._balances[one.client]
        one.cell = balance.choose(now, (self._rng.random(), self._rng.random()))
        balance.begun(one.cell)
        cell = self.cells[one.cell]
        try:
            if cell.is_lost:
                raise _lost()
            cell.limiter.reserve(one.job.num_prompt + one.job.num_output)
        except (ServiceError, SluiceError) as error:
            one.num_refused += 1
            balance.ended(one.cell)
            balance.failed(one.cell, _as_client_sees(error), now)
            self._at(now + RETRY_S * self._rng.uniform(0.5, 1.0), self._caller(self._send, one))
            return
        one.is_admitted = True
        self._at(now + self._hop_s / 2, self._caller(self._route, one, one.attempt))

    def _route(self, now: float, one: Following, attempt: int) -> None:
        cell = self.cells[one.cell]
        if cell.is_lost or attempt != one.attempt:
            return
        request_id = self._id(one)
        one.names = one.names or names_of(SALT, one.job.prompt, cell.block_size)
        one.engine = cell.choose(one.names, one.job.num_prompt, request_id, now)
        self._enter(now, one, request_id, prefill_only=bool(cell.prefill) and not one.tokens)

    def _enter(self, now: float, one: Following, request_id: str, *, prefill_only: bool) -> None:
        num = 1 if prefill_only else one.job.num_output
        request = EngineRequest(
            request_id,
            one.job.prompt,
            SamplingParams(max_tokens=num, temperature=0.0, ignore_eos=True),
            arrival_s=now,
            cache_salt=SALT,
            resume_ids=(tuple(one.tokens),) if one.tokens else (),
        )
        self._open[request_id] = one
        self.cells[one.cell].engines[one.engine].add(request)
        self._go_on(now, self.cells[one.cell], one.engine)

    @staticmethod
    def _id(one: Following) -> str:
        return f"{one.number:016x}{one.attempt:016x}"

    def _go_on(self, now: float, cell: Cell, name: str) -> None:
        engine = cell.engines[name]
        if engine.is_busy or cell.is_lost:
            return
        end_s = engine.begin(now)
        if end_s is not None:
            self._at(end_s, self._caller(self._step_ended, cell, name))

    def _step_ended(self, now: float, cell: Cell, name: str) -> None:
        if cell.is_lost:
            return
        for event in cell.engines[name].end(now):
            self._take(now, event, name)
        self._go_on(now, cell, name)

    def _take(self, now: float, event: Sampled, engine: str) -> None:
        one, at_s = self._open[event.request_id], now + self._hop_s / 2
        if event.admission is not None and not one.tokens:
            one.num_cached = event.admission.num_cached
        if not one.tokens:
            one.first_s = at_s
        elif event.token_ids:
            one.gap_s = max(one.gap_s, at_s - one.last_s)
        if event.token_ids:
            one.tokens.extend(event.token_ids)
            one.last_s = at_s
        if event.is_last:
            del self._open[event.request_id]
            self.cells[one.cell].ended(engine)
            if len(one.tokens) < one.job.num_output:
                self._hand_on(now, one)
            else:
                self._end(one)

    def _hand_on(self, now: float, one: Following) -> None:
        """The prompt is computed: another engine fetches its blocks, and goes on."""
        cell, kind = self.cells[one.cell], self._kind
        one.engine, one.attempt = cell.hand_on(self._id(one)), one.attempt + 1
        num_tokens = len(one.names) * cell.block_size
        self._at(
            now + 0.001 + num_tokens * kind.engine.cost.kv_bytes / kind.link_bytes_per_s,
            self._caller(self._fetched, one, one.attempt),
        )

    def _fetched(self, now: float, one: Following, attempt: int) -> None:
        cell = self.cells[one.cell]
        if cell.is_lost or attempt != one.attempt:
            return
        cell.engines[one.engine].fetch((*one.job.prompt, *one.tokens))
        self._enter(now, one, self._id(one), prefill_only=False)

    def _end(self, one: Following) -> None:
        one.is_done, one.names = True, []
        self._num_left -= 1
        self.cells[one.cell].limiter.release(one.job.num_prompt + one.job.num_output)
        self._balances[one.client].ended(one.cell)

    def _report(self, now: float, cell: Cell, name: str) -> None:
        if not cell.is_lost:
            cell.report(name, now)
            self._at(now + REPORT_S, self._caller(self._report, cell, name))

    def _tell(self, now: float, number: int, balance: Balance) -> None:
        if not self.cells[number].is_lost:
            balance.reported(number, self.cells[number].load(), now)
            self._at(now + INTERVAL_S, self._caller(self._tell, number, balance))

    def _lose(self, now: float) -> None:
        """The first cell is lost with all that it does: its clients go on elsewhere with what they have received."""
        self.cells[0].is_lost = True
        for one in self.following:
            if one.cell == 0 and one.is_admitted and not one.is_done:
                self._open.pop(self._id(one), None)
                one.attempt, one.is_moved, one.is_admitted = one.attempt + 1, True, False
                self._balances[one.client].ended(0)
                self._balances[one.client].failed(0, _lost(), now)
                self._at(now + NOTICE_S * self._rng.uniform(0.5, 1.0), self._caller(self._send, one))


def _lost() -> SluiceError:
    return SluiceError("the cell is lost", code=grpc.StatusCode.UNAVAILABLE)


def _as_client_sees(error: ServiceError | SluiceError) -> SluiceError:
    if isinstance(error, SluiceError):
        return error
    found = SluiceError(str(error), code=grpc.StatusCode[error.code.name], reason=error.reason)
    found.retry_after_s = error.retry_after_s
    return found


def quantile(values: Sequence[float], share: float) -> float:
    """Returns the value below which this share of the values lies."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))] if values else 0.0
