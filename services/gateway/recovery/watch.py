"""Admits requests only while the ring works: sends probes, makes the warm-up token, detects losses, resends requests.

Stands between the request manager and the ring. Time is passed in with `beat`. Has no task and no loop of its own: the
gateway calls it, and gets `on_change` when there is something to publish. Independent of gRPC.
"""

import dataclasses
import logging
from collections.abc import Callable
from typing import TypeAlias

from sluice_server.engine.errors import ServiceError, other_revision, schema_mismatch, stage_lost
from sluice_server.engine.request import Limits, SamplingParams
from sluice_server.services.faults import fault
from sluice_server.services.gateway.access.call import CallMetadata
from sluice_server.services.gateway.contract.translate import TranslatedRequest
from sluice_server.services.gateway.recovery.liveness import Liveness
from sluice_server.services.gateway.recovery.resend import Recovery
from sluice_server.services.gateway.requests.manager import RequestManager
from sluice_server.services.gateway.requests.open_request import OpenRequest, RequestStatus
from sluice_server.services.gateway.settings import GatewaySettings, ModelInfo
from sluice_server.services.messages.messages import Message, Mismatch, Probe, Role
from sluice_server.services.messages.work import Generate, TokenPrompt
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
    """The watch over the ring of one gateway."""

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
        self._num_lost_frames = 0
        self._warm_up: OpenRequest | None = None
        self._is_warm = False
        self._is_mixed = False  # probes come back, but the revisions differ
        self._mismatch: ServiceError | None = None  # schema versions of two processes differ
        self._mismatch_s = 0.0  # when it was reported

    def beat(self, elapsed_s: float) -> None:
        """Sends probes and evaluates earlier ones; `elapsed_s`: seconds that this process ran since the last call."""
        for probe in self._liveness.send(elapsed_s, is_mixed=self._is_mixed):
            self._emit(probe)
        if self._is_warm and self._liveness.is_lost(self._inputs.step_s()):
            self.stage_lost()
        if self._recovery.is_overdue(self._clock()):
            self._manager.fail_all(self._why())
        num_lost = self._inputs.num_lost_frames()
        if num_lost != self._num_lost_frames:  # any request may have lost a message
            self._num_lost_frames = num_lost
            self._recovery.again([one for one in self._manager.requests if one.outcome is None and not one.is_own])
            self._missed()
        self._warm()
        self._replay()

    def returned(self, probe: Probe) -> None:
        """Handles a probe that has come back."""
        changes = self._liveness.returned(probe)
        if changes.missed:
            self._recovery.missed(changes.missed, self._manager.requests)
            self._missed()
        if changes.new:
            to_blame = self._recovery.replaced(changes.new, self._manager.requests)
            if to_blame is not None:
                to_blame.end(self._ended_twice(to_blame))
            self.stage_lost()
        self._warm()

    def mismatched(self, found: Mismatch) -> None:
        """Handles the report that a process refuses another one's frames. Requests are refused with that error
        meanwhile."""
        self._mismatch = schema_mismatch(found.reader, found.reader_schema, found.sender, found.sender_schema)
        self._mismatch_s = self._clock()
        if not self._is_warm and not self._manager.is_draining:
            self._manager.refusal = self._mismatch

    def send_pending(self) -> None:
        """Sends further waiting requests again; called after each message for a request."""
        if self._recovery.is_busy:
            self._replay()

    def stage_lost(self, *, planned: bool = False) -> None:
        """Refuses new requests until a lost process of the ring is back. Open requests wait."""
        self._manager.pause_streams()
        self._recovery.lost(self._clock(), planned=planned)
        self._is_warm = self._is_mixed = False
        self._liveness.forget()
        self._give_up_warm_up()
        if not self._manager.is_draining:
            self._manager.refusal = self._why()
        self._inputs.on_change()

    def _missed(self) -> None:
        """Reacts to lost frames: the warm-up or a Cancel may have been in one."""
        self._give_up_warm_up()
        self._manager.announce_open()

    def _why(self) -> ServiceError:
        """Returns the error for requests while the ring does not work."""
        if self._mismatch is not None and self._clock() - self._mismatch_s <= FRESH_S:
            return self._mismatch
        return stage_lost("serving")

    def _ended_twice(self, request: OpenRequest) -> ServiceError:
        """Returns the error of a request with which a process has ended twice; it names the role of that process."""
        route = zip(NEXT.values(), self._route_of(request.envelope.request_id), strict=False)
        role = next((role for role, name in route if request.replay.losses[name] > 1), Role.ENGINE)
        return fault(role, about(request.envelope), "ended twice while it worked on this request")

    def _give_up_warm_up(self) -> None:
        if self._warm_up is not None:
            self._warm_up.end(stage_lost("serving"))

    def _route_of(self, request_id: str) -> tuple[str, str, str]:
        tokenizers, engines, detokenizers = self._settings.stages
        return peer_of(request_id, tokenizers), peer_of(request_id, engines), peer_of(request_id, detokenizers)

    def _replay(self) -> None:
        for request in self._recovery.due(self._clock()):
            self._manager.resubmit(request)

    def _is_of_one_revision(self) -> bool:
        """Whether all processes, this one included, serve one revision. A new common revision is adopted here.

        Otherwise requests stay refused: processes whose files were replaced since they were read start again.
        """
        revision, was_mixed = self._liveness.revision, self._is_mixed
        before = self._manager.settings.model.revision
        found = self._inputs.read_model(revision) if revision is not None and revision != before else None
        if found is not None:
            logger.info("requests are of revision %s from now on%s", revision, f"; it was {before}" if before else "")
            self._adopt(*found)
        self._is_mixed = revision != self._manager.settings.model.revision
        if self._is_mixed and not was_mixed:
            text = "the processes serve or read different revisions (%s): no request is admitted until they agree"
            logger.warning(text, self._liveness.revisions)
        return not self._is_mixed

    def _adopt(self, model: ModelInfo, limits: Limits) -> None:
        """Serves this model from now on. Open requests of another revision end."""
        self._manager.settings = dataclasses.replace(self._manager.settings, model=model, limits=limits)
        for request in self._manager.requests:
            if request.envelope.revision != model.revision:
                request.end(other_revision(request.envelope.revision, model.revision))

    def _warm(self) -> None:
        """Requests one token once a probe has come back on every route; admits requests when the token has come."""
        if self._warm_up is None:
            if not self._is_warm and self._liveness.is_complete and self._is_of_one_revision():
                self._warm_up = self._manager.open_own(CallMetadata("warm-up"), one_token(self._manager.settings))
                self._warm_up.delivery.on_news = self._warm
            return
        if self._warm_up.state is RequestStatus.RUNNING:
            return
        made, self._warm_up = self._warm_up, None
        self._manager.close(made)
        self._is_warm = made.state is RequestStatus.FINISHED
        if not self._is_warm:
            return
        self._recovery.restored()
        self._manager.announce_open()
        if not self._manager.is_draining:
            self._manager.refusal = None
        self._inputs.on_change()


def one_token(settings: GatewaySettings) -> TranslatedRequest:
    """Returns the work of a warm-up request."""
    token_id = settings.model.eos_ids[0] if settings.model.eos_ids else 0
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    return TranslatedRequest(
        Generate(prompt=TokenPrompt(token_id.to_bytes(4, "little")), params=params), token_records=False
    )
