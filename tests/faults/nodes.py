"""The processes of a ring in one process: real stages, a real gateway's requests, a hash as model, links of frames.

Each node is up, with an epoch of its own, or down; frames for a node that is down wait.
"""

import dataclasses
import functools
import random
import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from sluice_server.engine.engine import Engine
from sluice_server.engine.kv_cache.cache import KVCache
from sluice_server.engine.kv_cache.log import CacheLog
from sluice_server.engine.plan import StepPlan, StepResult
from sluice_server.engine.request import EngineRequest, Limits, SamplingParams
from sluice_server.engine.scheduler.scheduler import Scheduler
from sluice_server.services.config import KV_COST
from sluice_server.services.detokenizer.flush_timer import Alarm
from sluice_server.services.detokenizer.stage import DetokenizerStage
from sluice_server.services.engine.membership import RingMembership
from sluice_server.services.engine.stage import EngineStage
from sluice_server.services.gateway.access.quota import Quotas, TenantLimits
from sluice_server.services.gateway.recovery.watch import RingWatch, WatchInputs
from sluice_server.services.gateway.requests.books import Books
from sluice_server.services.gateway.requests.manager import RequestManager
from sluice_server.services.gateway.settings import GatewaySettings, ModelInfo
from sluice_server.services.messages.messages import Grant, Message
from sluice_server.services.messages.processes import CacheChanges, EngineRole, Probe, Report, Role, Visit
from sluice_server.services.ring.leases import Leases
from sluice_server.services.ring.peers import NEXT, NextHop
from sluice_server.services.ring.receipts import Receipts
from sluice_server.services.ring.stage import Stage
from sluice_server.services.telemetry.observed import Unobserved
from sluice_server.services.tokenizer.encoding import TextEncoder
from sluice_server.services.tokenizer.prompt_router import PromptRouter
from sluice_server.services.tokenizer.stage import EncodingThreads, TokenizerStage
from tests.engine.scheduler.fake_model import VOCAB, FakeRunner, sample
from tests.engine.scheduler.ledger import EOS
from tests.oracle.tokenizers import byte_level_bpe
from tests.services.executors import OnDemand
from tests.services.tokenizer.constrain import idle_constraints

LIMITS = Limits(context_length=96, vocab_size=VOCAB)
BLOCK_SIZE = 4
Ids = dict[Role, tuple[str, ...]]


def ids_of(num_engines: int) -> Ids:
    """The processes of a ring."""
    return {
        Role.GATEWAY: ("g0", "g1"),
        Role.TOKENIZER: ("t0", "t1"),
        Role.ENGINE: tuple(f"e{i}" for i in range(num_engines)),
        Role.DETOKENIZER: ("d0", "d1"),
    }


class World(Protocol):
    """What a process gets from its environment: clock, epochs, links."""

    rng: random.Random
    ids: Ids  # of engines: those of the file, which join and leave
    draining: set[str]
    num_handed_off: int
    num_hedged: int
    num_hedges_won: int
    for_prompts: set[str]  # engines that compute prompts only
    routing: str
    nodes: "dict[str, Node]"

    def clock(self) -> float:
        """The simulated time."""

    def next_epoch(self) -> int:
        """The epoch of a new process."""

    def link(self, sender: str, receiver: str) -> "Link":
        """The frames in transit between two processes."""


@functools.cache
def encoder() -> TextEncoder:
    """A tokenizer whose first ids are the model's."""
    with tempfile.TemporaryDirectory() as directory:
        byte_level_bpe(Path(directory))
        return TextEncoder.load(Path(directory))


class Device(FakeRunner):
    """The model as an engine's runner, which can compute a step while the next is planned."""

    progress = 0
    depth = 0

    def watch(self, on_layer: Callable[[], None]) -> None:
        """Does nothing: the model has no layers."""

    def idle(self) -> bool:
        """Does nothing: there is nothing to prepare."""
        return False

    def launch(self, plan: StepPlan) -> "Done":
        return Done(self.compute(plan, frozenset()), is_done=not self.depth)


@dataclasses.dataclass
class Done:
    result: StepResult
    is_done: bool

    def collect(self) -> StepResult:
        return self.result


def new_engine(clock: Callable[[], float], rng: random.Random) -> Engine:
    """A small engine in which preemption is common."""
    num_blocks, size, slots = 40, BLOCK_SIZE, 6
    cache = KVCache(num_blocks, size, prefix_caching=True)
    cache.index.log = CacheLog()
    scheduler = Scheduler(cache, LIMITS, (EOS,), slots, 16)
    device = Device(slots, num_blocks, size, 0, rng)
    device.depth = rng.randrange(2)
    return Engine(scheduler, device, clock=clock)


def unrecorded(*_: object) -> None:
    """Records no phase."""


class Counted(Unobserved):
    """Counts the hand-offs and the second attempts of a world."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def count(self, name: str, **labels: str) -> None:
        self._world.num_handed_off += name == "handed_off"
        self._world.num_hedged += name == "hedged"
        self._world.num_hedges_won += name == "hedge_won"


class Front:
    """A gateway's part of the ring: its requests and its watch."""

    def __init__(self, world: World, node: "Node") -> None:
        self.progress = 0
        self.forward: Callable[[Message], None] = node.emit if world.routing == KV_COST else lambda message: None
        settings = GatewaySettings(
            gateway_id=node.id,
            model=ModelInfo("toy", "", LIMITS.context_length, (EOS,)),
            limits=LIMITS,
            epoch=node.epoch,
            stages=(world.ids[Role.TOKENIZER], world.ids[Role.ENGINE], world.ids[Role.DETOKENIZER]),
            recovery_timeout_s=1e9,
            hedging_delay_s=0.1,
            routing=world.routing,
        )
        observer = Counted(world)
        quotas = Quotas(lambda tenant: TenantLimits(), 1)
        self.manager = RequestManager(settings, node.emit, observer, world.clock, Books(settings, quotas, world.clock))
        self.manager.new_id = lambda: f"{world.rng.getrandbits(128):032x}"
        inputs = WatchInputs(lambda: 0.01, lambda: node.receipts.counts["lost"], lambda revision: None, lambda: None)
        self.watch = RingWatch(self.manager, settings, node.emit, world.clock, inputs)
        self.watch.change_engines(set(world.ids[Role.ENGINE]), world.draining)

    def handle(self, message: Message) -> None:
        if isinstance(message, Probe):
            self.watch.returned(message)
        elif isinstance(message, Grant):
            self.manager.changes.take_back(message)
        elif isinstance(message, Report | CacheChanges):
            if isinstance(message, Report):
                self.manager.engines.learn(message.engine_id, message.role)
            self.forward(message)
        else:
            self.manager.answers.handle(message)  # type: ignore[arg-type]  # what a ring brings home
            self.watch.send_pending()

    def turn(self) -> bool:
        return False

    def reap(self) -> None:
        """Does nothing: the requests are the gateway's own."""


class Node:
    """A process: up with an epoch of its own, or down. It keeps messages for peers that are down."""

    def __init__(self, world: World, role: Role, name: str) -> None:
        self.world, self.role, self.id = world, role, name
        self.is_up = False
        self._router: PromptRouter | None = None
        self.boot()

    def boot(self) -> None:
        world, self.is_up = self.world, True
        self.epoch = world.next_epoch()
        self.receipts, self.leases, self.pool = Receipts(), Leases(), OnDemand()
        self._hop = NextHop(self.role, world.ids[NEXT[self.role]])
        self._waiting: dict[str, list[Message]] = {}
        self._seq: dict[str, int] = {}
        self._num_dropped = 0
        self._epoch_of: dict[str, int] = {}  # of the frames to peers that have joined since
        self.timers: list[Callable[[], None]] = []
        self.stage = self._new_stage()

    def _new_stage(self) -> Stage:
        world = self.world
        if self.role is Role.TOKENIZER:
            threads = EncodingThreads(self.pool, lambda call: call())
            router = PromptRouter(self.id, world.ids[Role.ENGINE], BLOCK_SIZE, self.emit, world.clock)
            router._router.hand_off_tokens = -30  # prompts are short here: so those for prompts get many
            routed = self._router = router if world.routing == KV_COST else None
            return TokenizerStage(encoder(), idle_constraints(), LIMITS, threads, self.emit, unrecorded, routed)
        if self.role is Role.DETOKENIZER:
            return DetokenizerStage(encoder(), self.emit, unrecorded, self.leases, Alarm(self.world.clock, self._later))
        if self.role is Role.ENGINE:
            role = EngineRole.PREFILL if self.id in world.for_prompts else EngineRole.BOTH
            place = RingMembership(self.id, self.epoch, self.leases, self.world.clock, role)
            return EngineStage(new_engine(self.world.clock, self.world.rng), place, self.emit, unrecorded)
        return Front(self.world, self)

    def _later(self, delay_s: float, callback: Callable[[], None]) -> None:
        self.timers.append(callback)

    def emit(self, message: Message) -> None:
        targets = self._hop.targets(message)
        self._num_dropped += not targets and self.role is Role.TOKENIZER and hasattr(message, "envelope")
        for peer in targets:
            self._waiting.setdefault(peer, []).append(message)

    def read_file(self) -> None:
        """Reads the file of the engines again, as gateways and tokenizers do at times of their own."""
        engines = self.world.ids[Role.ENGINE]
        if isinstance(self.stage, Front):
            self.stage.watch.change_engines(set(engines), self.world.draining)
        elif self.role is Role.TOKENIZER:
            for name in set(self._hop.ids) - set(engines):
                self._num_dropped += len(self._waiting.pop(name, ()))
            for name in set(engines) - set(self._hop.ids):
                self._epoch_of[name], self._seq[name] = self.world.next_epoch(), 0
            self._hop = NextHop(self.role, engines)
            if self._router is not None:
                self._router.change(engines)

    def receive(self, epoch: int, seq: int, messages: tuple[Message, ...], sender: str) -> None:
        """Handles a frame as the ring's loop does."""
        if not self.receipts.accept(sender, epoch, seq):
            return
        for message in messages:
            if isinstance(message, Probe) and self.role is not Role.GATEWAY:
                self.leases.seen(message.origin, message.epoch)
                lost = self.receipts.counts["lost"] + self._num_dropped
                visit = Visit(self.role, self.id, self.epoch, self.stage.progress, lost)
                self.emit(Probe(message.origin, message.nonce, message.route, (*message.visits, visit), message.epoch))
            else:
                self.stage.handle(message)
        if self.role is Role.DETOKENIZER:  # the turns of other roles are events of their own
            self.stage.turn()
        self.flush()

    def flush(self) -> None:
        """Sends the frames for all peers that are up."""
        for peer, messages in self._waiting.items():
            if messages and self.world.nodes[peer].is_up:
                self._seq[peer] = self._seq.get(peer, 0) + 1
                self.world.link(self.id, peer).append(
                    (self._epoch_of.get(peer, self.epoch), self._seq[peer], tuple(messages), self.id)
                )
                self._waiting[peer] = []


Link = deque[tuple[int, int, tuple[Message, ...], str]]


def independent(prompt: tuple[int, ...], params: SamplingParams) -> list[list[int]]:
    """The expected tokens of each output by itself."""
    return [sample(prompt, params, output, EOS) for output in range(params.n)]


def search(prompt: tuple[int, ...], params: SamplingParams) -> list[list[int]]:
    """The expected results of an undisturbed search."""
    engine, found = new_engine(lambda: 0.0, random.Random(0)), [list[int]() for _ in range(params.n)]
    engine.add(EngineRequest("0" * 32, prompt, params))
    while engine.has_work:
        for event in engine.step().sampled:
            found[event.output_index] += event.token_ids
    return found


class Alone(NamedTuple):
    """The expected content of an undisturbed output."""

    ids: list[int]
    text: str
    is_stopped: bool  # by its stop string


def alone(ids: list[int], stop: str) -> Alone:
    """An output of the tokens `ids` that ends with the first token which completes `stop`, "" for never."""
    decode = encoder().tokenizer.decode
    for end in range(1, len(ids) + 1) if stop else ():
        before, found, _ = decode(ids[:end]).partition(stop)
        if found:
            return Alone(ids[:end], before, is_stopped=True)
    return Alone(ids, decode(ids), is_stopped=False)
