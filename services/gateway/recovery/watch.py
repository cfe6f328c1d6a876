"""Admits requests only while the ring works: sends probes, makes the warm-up tokens, detects losses, resends requests.

An engine gets requests once it has made its warm-up token. If one of several engines is lost, its requests go on at the
others, and new ones are admitted all the time. If no other engine serves, or a tokenizer or detokenizer is lost,
requests wait until the ring works again; new ones are refused, or wait with them after a planned restart. Stands
between the request manager and the ring. Time is passed in with `beat`. Has no task and no loop of its own: the gateway
calls it, and gets `on_change` when there is something to publish. Independent of gRPC.
"""

import dataclasses
import logging
from collections.abc import Callable, Set
from typing import TypeAlias

from sluice_server.engine.errors import ServiceError, schema_mismatch, stage_lost
from sluice_server.engine.request import Limits, Pooling, SamplingParams
from sluice_server.services.faults import fault
from sluice_server.services.gateway.access.call import CallMetadata
from sluice_server.services.gateway.contract.translate import TranslatedRequest
from sluice_server.services.gateway.recovery.agreement import Agreement
from sluice_server.services.gateway.recovery.liveness import Liveness
from sluice_server.services.gateway.recovery.resend import Recovery
from sluice_server.services.gateway.requests.manager import RequestManager
from sluice_server.services.gateway.requests.open_request import OpenRequest, RequestStatus
from sluice_server.services.gateway.settings import GatewaySettings, ModelInfo
from sluice_server.services.messages.messages import Envelope, Message
from sluice_server.services.messages.processes import Mismatch, Probe, Role
from sluice_server.services.messages.work import Embed, Generate, TokenPrompt, VectorOptions
from sluice_server.services.ring.peers import NEXT, peer_of
from sluice_server.services.ring.schema_mismatches import FRESH_S
from sluice_server.services.telemetry.logs import about

logger = logging.getLogger(__name__)

ReadModel: TypeAlias = Callable[[str], tuple[ModelInfo, Limits] | None]


@dataclasses.dataclass(frozen=True, slots=True)
class WatchInputs:
    """What the watch gets from its process.

    Attributes:
        step_s: returns the engines' longest recent step, in seconds.
        num_lost_frames: returns how many frames of the ring never arrived at this process.
        read_model: returns the model of a revision from this process's files; None if they hold another revision.
        on_change: called when there is something to publish.
    """

    step_s: Callable[[], float]
    num_lost_frames: Callable[[], int]
    read_model: ReadModel
    on_change: Callable[[], None]


class RingWatch:
    """The watch over the ring of one gateway.

    Attributes:
        is_expected: the ring is being started, and requests wait for it however long that takes.
    """

    def __init__(
        self,
        manager: RequestManager,
        settings: GatewaySettings,
        emit: Callable[[Message], None],
        clock: Callable[[], float],
        inputs: WatchInputs,
    ) -> None:
        self._manager = manager
        self._settings = settings
        self._emit = emit
        self._clock = clock
        self._inputs = inputs
        self._liveness = Liveness(settings.gateway_id, settings.epoch, settings.stages, settings.probe_timeout_s)
        self._recovery = Recovery(self._route_of, settings.recovery_timeout_s)
        self._engines = manager.engines
        self._agreement = Agreement(manager, self._liveness, inputs.read_model)
        self._num_lost_frames = 0
        self._warm_ups: dict[str, OpenRequest] = {}  # by engine
        self._held: list[OpenRequest] = []  # admitted during a planned restart, and not sent yet
        self._mismatch: ServiceError | None = None  # schema versions of two processes differ
        self._mismatch_s = 0.0  # when it was reported
        self.is_expected = False

    @property
    def is_whole(self) -> bool:
        """Whether every engine serves."""
        return self._engines.is_whole

    def beat(self, elapsed_s: float) -> None:
        """Sends probes and evaluates earlier ones; `elapsed_s`: seconds that this process ran since the last call."""
        is_used = len(self._manager.requests) > 0 or not self._engines.is_whole
        is_mixed, num_generating = self._agreement.is_mixed, self._manager.books.num_generating
        for probe in self._liveness.send(elapsed_s, is_mixed=is_mixed, is_used=is_used, num_generating=num_generating):
            self._emit(probe)
        if self._engines.is_any_serving:
            self._look_for_losses(self._inputs.step_s())
        if not self.is_expected and self._recovery.is_overdue(self._clock()):
            self._refuse()
            self._manager.fail_all(self._why())
        num_lost = self._inputs.num_lost_frames()
        if num_lost != self._num_lost_frames:  # any request may have lost a message
            self._num_lost_frames = num_lost
            self._recovery.again([one for one in self._manager.requests if one.outcome is None and not one.is_own])
            self._missed(frozenset())
        self._warm()
        self._replay()

    def returned(self, probe: Probe) -> None:
        """Handles a probe that has come back."""
        changes = self._liveness.returned(probe)
        if changes.missed:
            self._recovery.missed(changes.missed, self._manager.requests)
            self._missed(changes.missed)
        if changes.new:
            self._begin_replay(changes.new)
            self.lost(changes.new, planned=self._recovery.is_planned)
        self._warm()

    def mismatched(self, found: Mismatch) -> None:
        """Handles the report that a process refuses another one's frames. Requests are refused with that error
        meanwhile."""
        self._mismatch = schema_mismatch(found.reader, found.reader_schema, found.sender, found.sender_schema)
        self._mismatch_s = self._clock()
        if not self._engines.is_any_serving:
            self._refuse()

    def send_pending(self) -> None:
        """Sends further waiting requests again; called after each message for a request."""
        if self._recovery.is_busy:
            self._replay()

    def lost(self, names: Set[str], *, planned: bool = False) -> None:
        """Handles the loss of these processes; without names of the ring, of an unknown one. `planned`: no request
        caused it."""
        tokenizers, _, detokenizers = self._settings.stages
        known = names & {*tokenizers, *self._engines.ids, *detokenizers}  # not the other ranks of an engine
        if known and known <= set(self._engines.ids) and self._engines.serving - known:
            self._move(known, planned=planned)
        else:
            self.stage_lost(planned=planned)

    def change_engines(self, ids: Set[str], draining: Set[str]) -> None:
        """Makes these the engines of the ring. The requests of those that left go on at others; those that drain get no
        new ones, while another engine serves."""
        left = frozenset(self._engines.ids) - ids
        used = {name for name in left if self._engines.is_used(name) or name in self._warm_ups}
        if used:
            self.lost(used, planned=True)
            self._begin_replay(used, planned=True)  # no probe will tell that they are back
        self._engines.change(ids, draining)
        self._liveness.change(self._engines.ids)
        self._inputs.on_change()

    @property
    def drained(self) -> frozenset[str]:
        """The draining engines that have no request any more."""
        return self._engines.draining - {name for one in self._manager.requests for name in one.engines}

    def stage_lost(self, *, planned: bool = False) -> None:
        """Lets open requests wait until a lost process of the ring is back. New ones are refused; after a planned
        restart they wait, too."""
        self._manager.pause_streams()
        self._recovery.lost(self._clock(), planned=planned)
        self._engines.drop_all()
        self._agreement.is_mixed = False
        self._liveness.forget()
        self._give_up_warm_ups(set(self._warm_ups))
        if (planned or self.is_expected) and self._manager.refusal is None:
            self._manager.hold = self._hold
        else:
            self._refuse()
        self._inputs.on_change()

    def expect(self) -> None:
        """Has requests wait for a ring that is to be started, those that are open and those that come."""
        if not self._manager.is_draining:
            self._manager.refusal = None
        self.is_expected = True
        self.stage_lost(planned=True)
        for request in self._manager.requests:
            if request.outcome is None and not request.is_own:
                self._hold(request)

    def _hold(self, request: OpenRequest) -> None:
        self._held.append(request)
        self._recovery.again([request])
        if self.is_expected:
            self._inputs.on_change()

    def _refuse(self) -> None:
        """Refuses new requests until the ring works again."""
        self._manager.hold = None
        if not self._manager.is_draining:
            self._manager.refusal = self._why()

    def _look_for_losses(self, step_s: float) -> None:
        """Moves the requests of engines that are silent; if the silence is not an engine's alone, the ring is lost."""
        lost = {name for name in self._liveness.lost_engines(step_s) if self._engines.is_used(name)}
        if lost & self._engines.serving:
            logger.warning("%s: no probe comes back; other engines take over", ", ".join(sorted(lost)))
        if lost:
            self.lost(lost)
        if self._liveness.is_lost(step_s, self._engines.serving):
            self.stage_lost()

    def _move(self, engines: Set[str], *, planned: bool = False) -> None:
        """Sends the requests of lost engines to others. Those engines serve again after another warm-up."""
        for name in engines:
            self._engines.drop(name)
        self._liveness.forget(engines)
        self._give_up_warm_ups(engines)
        self._begin_replay(engines, planned=planned)
        self._replay()
        self._inputs.on_change()

    def _begin_replay(self, names: Set[str], *, planned: bool = False) -> None:
        """Queues the requests of processes whose state is lost, or ends the one request that ends them."""
        to_blame = self._recovery.replaced(names, self._manager.requests, planned=planned)
        if to_blame is not None:
            to_blame.end(self._ended_twice(to_blame))

    def _missed(self, names: Set[str]) -> None:
        """Reacts to frames lost on the way to these processes: the warm-up or a Cancel may have been in one. What a
        tokenizer lost may have been for any engine."""
        self._give_up_warm_ups(set(self._warm_ups))
        self._manager.announce_open()
        engines = set(self._engines.ids)
        for engine in sorted(engines if names & set(self._settings.stages[0]) else names & engines):
            self._manager.disown(engine)

    def _why(self) -> ServiceError:
        """Returns the error for requests while the ring does not work."""
        if self._mismatch is not None and self._clock() - self._mismatch_s <= FRESH_S:
            return self._mismatch
        return stage_lost("serving")

    def _ended_twice(self, request: OpenRequest) -> ServiceError:
        """Returns the error of a request with which a process has ended twice; it names the role of that process."""
        route = zip(NEXT.values(), self._route_of(request.envelope), strict=False)
        role = next((role for role, name in route if request.replay.losses[name] > 1), Role.ENGINE)
        return fault(role, about(request.envelope), "ended twice while it worked on this request")

    def _give_up_warm_ups(self, engines: Set[str]) -> None:
        for made in [self._warm_ups[engine] for engine in engines & self._warm_ups.keys()]:
            made.end(stage_lost("serving"))

    def _route_of(self, envelope: Envelope) -> tuple[str, str, str]:
        tokenizers, _, detokenizers = self._settings.stages
        return peer_of(envelope.request_id, tokenizers), envelope.engine, peer_of(envelope.request_id, detokenizers)

    def _replay(self) -> None:
        for request in self._recovery.due(self._clock()):
            self._manager.resubmit(request)

    def _admits(self, engine: str) -> bool:
        """Whether an engine may serve beside the others. While none can, new requests are refused."""
        was_mixed, is_admitted = self._agreement.is_mixed, self._agreement.admits(engine)
        if self._agreement.is_mixed and not was_mixed and not self._engines.is_any_serving and not is_admitted:
            self._refuse()
            for request in self._held:  # of the old revision, and never sent: clients may try them again
                request.end(self._why())
            self._held.clear()
        return is_admitted

    def _warm(self) -> None:
        """Requests a token or a vector of each engine once probes have come back on every route through it; the engine
        gets requests when it has come."""
        for engine, made in list(self._warm_ups.items()):
            if made.state is not RequestStatus.RUNNING and self._warm_ups.pop(engine, None) is made:
                self._warmed(engine, made)
        for engine in sorted(self._liveness.complete - self._engines.serving - self._warm_ups.keys()):
            if not self._admits(engine):
                continue
            made = self._manager.open_own(CallMetadata("warm-up"), first_work(self._manager.settings), engine)
            self._warm_ups[engine] = made
            made.delivery.on_news = self._warm

    def _warmed(self, engine: str, made: OpenRequest) -> None:
        """Ends a warm-up. If the token has come the engine serves; the first one that does so admits requests. Replays
        wait for the other warm-ups, so that requests stay with their engines."""
        self._manager.close(made)
        is_good = made.state is RequestStatus.FINISHED
        if is_good:
            self._engines.admit(engine)
        if self._engines.is_any_serving and not self._warm_ups:
            self._recovery.restored()
        if not is_good:
            return
        self._manager.announce_open()
        self._manager.disown(engine)
        self.is_expected = False
        self._manager.hold = None
        self._held.clear()
        if not self._manager.is_draining:
            self._manager.refusal = None
        self._inputs.on_change()


def first_work(settings: GatewaySettings) -> TranslatedRequest:
    """Returns the work of a warm-up request: one token, or one vector of a model that generates nothing."""
    token_id = settings.model.eos_ids[0] if settings.model.eos_ids else 0
    prompt = TokenPrompt(token_id.to_bytes(4, "little"))
    if not settings.model.generates:
        return TranslatedRequest(Embed((prompt,), VectorOptions(Pooling.LAST, normalize=False, dimensions=1)))
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    return TranslatedRequest(Generate(prompt=prompt, params=params), token_records=False)
