"""A gateway on a loopback port with a ring that the test plays: it lists and answers what the gateway emits."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import msgspec
from sluice.v1 import control_pb2_grpc, inference_pb2, inference_pb2_grpc, types_pb2

from sluice_server.engine.request import FinishReason, Limits
from sluice_server.services.gateway.access.quota import Quotas
from sluice_server.services.gateway.gateway import Gateway
from sluice_server.services.gateway.models.lane import Lane, Ring
from sluice_server.services.gateway.recovery.watch import ReadModel
from sluice_server.services.gateway.requests.books import Books
from sluice_server.services.gateway.requests.manager import RequestManager
from sluice_server.services.gateway.settings import GatewaySettings, ModelInfo
from sluice_server.services.messages.control import Operation
from sluice_server.services.messages.details import Admitted, Embedded, Routed, Timings, TokenRecord
from sluice_server.services.messages.messages import Cancel, Grant, Message, Preempted, Result, Submit, Text
from sluice_server.services.messages.processes import Probe, Role, Visit
from sluice_server.services.messages.work import Embed, Generate, Stops, TokenPrompt
from sluice_server.services.telemetry.observed import Observer, Unobserved

FIRST_INPUT = TokenPrompt((2).to_bytes(4, "little"))  # of the warm-up of a model that generates nothing
MODEL = ModelInfo(id="toy", revision="r1", context_length=1000, eos_ids=(2,), architecture="Toy", vector_width=8)
SETTINGS = GatewaySettings(
    gateway_id="g0",
    model=MODEL,
    limits=Limits(context_length=1000, vocab_size=100),
    listen="127.0.0.1:0",
    stages=(("t0",), ("e0",), ("d0",)),
    probe_interval_s=0.01,
)


def settings(**changes: Any) -> GatewaySettings:  # noqa: ANN401  # any field of the dataclass
    return dataclasses.replace(SETTINGS, **changes)


def manager_of(chosen: GatewaySettings, emit: Callable[[Message], None], quotas: Quotas) -> RequestManager:
    """A manager that is alone at its gateway; its clock stands still."""
    return RequestManager(chosen, emit, Unobserved(), lambda: 0.0, Books(chosen, quotas, lambda: 0.0))


def text_of(
    submit: Submit, index: int, text: str, *, first: bool = False, last: bool = False, routed: Routed | None = None
) -> Text:
    """One token of a generation, as the detokenizer would send it."""
    return Text(
        envelope=submit.envelope,
        first_index=index,
        tokens=(TokenRecord(id=index % 100, piece=text.encode()),),
        text=text,
        admitted=Admitted(num_prompt=3, num_cached=1, max_tokens=8, stops=Stops(), routed=routed) if first else None,
        finish=FinishReason.LENGTH if last else None,
        timings=Timings(queue_s=0.5, num_preemptions=2) if last else None,
    )


def generation(submit: Submit, words: list[str]) -> list[Text]:
    """A whole generation, one word a message."""
    last = len(words) - 1
    return [text_of(submit, at, word, first=at == 0, last=at == last) for at, word in enumerate(words)]


class FakeRing:
    """Answers probes and warm-ups at once; other requests by `script`, or not at all."""

    def __init__(self) -> None:
        self._lane: Lane | None = None
        self.emitted: list[Message] = []
        self.script: Callable[[Submit], None] = lambda submit: None
        self.script_operations: Callable[[Operation], None] = lambda operation: None
        self.answers_probes = True
        self.epoch = 1
        self.epochs: dict[str, int] = {}  # of single processes
        self.lost: dict[str, int] = {}  # frames that single processes lost
        self.silent: set[str] = set()  # processes that no probe comes back from, and that compute nothing
        self.of_roles: dict[str, str] = {}  # revisions that are not the model's
        self.of_processes: dict[str, str] = {}
        self.identities: dict[str, str] = {}  # of engines
        self.read_model: ReadModel = lambda revision: None
        self.changed = asyncio.Event()

    def opened(self, gateway: Gateway, chosen: GatewaySettings, name: str = "m0") -> Lane:
        """Opens the lane of this ring."""
        ring = Ring(self.emit, read_model=lambda revision: self.read_model(revision))
        self._lane = gateway.open(name, chosen, ring)
        return self._lane

    @property
    def lane(self) -> Lane:
        assert self._lane is not None
        return self._lane

    def emit(self, message: Message) -> None:
        self.emitted.append(message)
        self.changed.set()
        asyncio.get_running_loop().call_soon(self._answer, message)

    def play(self, *messages: Text | Preempted | Grant) -> None:
        for message in messages:
            self.lane.handle(message)

    @property
    def submits(self) -> list[Submit]:
        """The submitted requests of clients, without the gateway's own warm-up."""
        return [one for one in self.emitted if isinstance(one, Submit) and not is_warm_up(one)]

    @property
    def cancels(self) -> list[str]:
        return [one.envelope.request_id for one in self.emitted if isinstance(one, Cancel)]

    async def until(self, met: Callable[[], object]) -> None:
        while not met():
            self.changed.clear()
            await self.changed.wait()

    async def next_submit(self) -> Submit:
        await self.until(lambda: self.submits)
        return self.submits[-1]

    def _answer(self, message: Message) -> None:
        if isinstance(message, Probe) and (not self.answers_probes or self.silent & set(message.route)):
            pass
        elif isinstance(message, Probe):
            roles = (Role.TOKENIZER, Role.ENGINE, Role.DETOKENIZER)
            ways = zip(roles, message.route, strict=True)
            visits = tuple(
                Visit(
                    *(role, one, self.epochs.get(one, self.epoch), 1, self.lost.get(one, 0)),
                    *(self.of_processes.get(one, self._revision(role)), self.identities.get(one, "")),
                )
                for role, one in ways
            )
            self.lane.handle(msgspec.structs.replace(message, visits=visits))
        elif isinstance(message, Submit) and message.envelope.engine in self.silent:
            pass
        elif isinstance(message, Submit) and is_warm_up(message):
            self._warm(message)
        elif isinstance(message, Submit):
            self.script(message)
        elif isinstance(message, Operation):
            self.script_operations(message)
        self.changed.set()

    def _warm(self, submit: Submit) -> None:
        """Answers a warm-up: with a token, or with a vector of a model that generates nothing."""
        if isinstance(submit.work, Embed):
            self.lane.handle(Result(submit.envelope, Embedded((bytes(4),), (1,), 0, Timings())))
        else:
            self.play(text_of(submit, 0, "w", first=True, last=True))

    def _revision(self, role: Role) -> str:
        return self.of_roles.get(role, MODEL.revision)


def public(submit: Submit) -> str:
    """The generation id that clients see."""
    return f"{submit.envelope.request_id}.{submit.envelope.origin}"


def is_warm_up(submit: Submit) -> bool:
    work = submit.work
    if isinstance(work, Embed):
        return work.inputs == (FIRST_INPUT,) and work.options.dimensions == 1
    return isinstance(work, Generate) and work.params.max_tokens == 1 and work.params.ignore_eos


@dataclasses.dataclass
class Rig:
    """A gateway, its ring and a client."""

    ring: FakeRing
    gateway: Gateway
    lane: Lane
    channel: grpc.aio.Channel
    stub: "inference_pb2_grpc.InferenceServiceAsyncStub"
    control: "control_pb2_grpc.ControlServiceAsyncStub"
    port: int


@contextlib.asynccontextmanager
async def running(
    chosen: GatewaySettings = SETTINGS,
    *,
    observer: Observer | None = None,
    channel_options: tuple[tuple[str, int], ...] = (),
    wait: bool = True,
    prepare: Callable[[Gateway], None] = lambda gateway: None,
) -> AsyncIterator[Rig]:
    """`prepare` gets the gateway before it listens."""
    ring = FakeRing()
    gateway = Gateway(chosen, observer)
    lane = ring.opened(gateway, chosen)
    prepare(gateway)
    port = await gateway.start()
    local = (("grpc.use_local_subchannel_pool", 1), *channel_options)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=local) as channel:
        inference = inference_pb2_grpc.InferenceServiceStub(channel)
        control = control_pb2_grpc.ControlServiceStub(channel)
        rig = Rig(ring, gateway, lane, channel, inference, control, port)
        if wait:
            await ring.until(lambda: gateway.is_serving)
        try:
            yield rig
        finally:
            await gateway.stop(0.0)


def spec(text: str = "hello", **fields: Any) -> types_pb2.GenerationSpec:  # noqa: ANN401  # any field of the message
    return types_pb2.GenerationSpec(text=text, **fields)


def stream_request(**fields: Any) -> inference_pb2.StreamGenerateRequest:  # noqa: ANN401  # as above
    return inference_pb2.StreamGenerateRequest(spec=spec(**fields))


def unary_request(**fields: Any) -> inference_pb2.GenerateRequest:  # noqa: ANN401  # as above
    return inference_pb2.GenerateRequest(spec=spec(**fields))
