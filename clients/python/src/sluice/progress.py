"""What a client has received of one generation, and the request for the rest of it. Pure: no I/O, no clock.

It takes the events of StreamGenerate, ResumeGenerate or Converse and returns the deltas not received before.
"""

from typing import TypeAlias

from sluice.received import Received
from sluice.v1 import inference_pb2, types_pb2

Message: TypeAlias = inference_pb2.StreamGenerateResponse | inference_pb2.ResumeGenerateResponse
Event: TypeAlias = Message | inference_pb2.ConverseResponse
_EFFECTIVE = ("sampling", "stop", "output", "constraint", "cache", "scheduling", "speculation")


class Progress:
    """The state of one generation at its client.

    Attributes:
        spec: the request.
        accepted: the first message; None until it has come.
        prompt_info: facts about the prompt; only with echo or prompt_logprobs.
        ends: how each output ended, by its index.
        finished: the last message; None until it has come.
        last_seq: sequence number of the last delta; 0 without one.
    """

    def __init__(self, spec: types_pb2.GenerationSpec) -> None:
        self.spec = spec
        self.accepted: types_pb2.Accepted | None = None
        self.prompt_info: types_pb2.PromptInfo | None = None
        self.ends: dict[int, types_pb2.OutputFinished] = {}
        self.finished: types_pb2.Finished | None = None
        self.last_seq = 0
        self._received = Received()
        self._throttled: tuple[int, inference_pb2.Throttled] | None = None  # with the number of the delta before it

    @property
    def detaches(self) -> bool:
        """Whether the server keeps the generation when its connection is lost."""
        return self.spec.scheduling.on_disconnect == types_pb2.DISCONNECT_ACTION_DETACH

    @property
    def has_begun(self) -> bool:
        """Whether the generation is continued by ResumeGenerate; otherwise the request is sent again."""
        return self.accepted is not None and (self.last_seq > 0 or self.detaches)

    @property
    def can_go_on(self) -> bool:
        """Whether it can continue after a lost connection: by its ids, from the beginning, or kept by its server."""
        return not self.last_seq or self.detaches or self._received.has_all_ids

    @property
    def stays(self) -> bool:
        """Whether only the server that has the generation can continue it: ids are missing here."""
        return self.detaches and not self._received.has_all_ids

    @property
    def num_tokens(self) -> int:
        """Tokens received, over all outputs."""
        return self._received.num_tokens

    @property
    def throttled(self) -> inference_pb2.Throttled | None:
        """What the generation waits for; None while it is running."""
        seq, throttled = self._throttled or (self.last_seq, None)
        return throttled if seq == self.last_seq else None

    def deltas(self, message: Message) -> list[types_pb2.Delta]:
        """Records the events of a message. Returns its deltas that were not received before."""
        return [delta for event in (message, *message.more) if (delta := self.take(event)) is not None]

    def take(self, event: Event) -> types_pb2.Delta | None:
        """Records an event. Returns its delta, unless it has none or the delta was received before."""
        delta = event.delta
        seq = delta.seq  # 0 if the event is no delta
        if seq > self.last_seq:
            self.last_seq = seq
            self._received.note(delta)
            return delta
        if not seq:
            self._take_other(event)
        return None

    def _take_other(self, event: Event) -> None:
        match _kind(event):
            case "accepted":
                self.accepted = event.accepted
            case "prompt_info":
                self.prompt_info = event.prompt_info
            case "output_finished":
                self.ends.setdefault(event.output_finished.output_index, event.output_finished)
            case "finished":
                self.finished = event.finished
            case "throttled":
                assert isinstance(event, inference_pb2.ConverseResponse)
                self._throttled = (self.last_seq, event.throttled)

    def update(self, update: inference_pb2.Update) -> None:
        """Records an update of parameters, so that a resumption keeps it."""
        for params in (self.spec, self.accepted.params if self.accepted is not None else self.spec):
            if update.HasField("max_tokens"):
                params.sampling.max_tokens = update.max_tokens
            if update.HasField("priority"):
                params.scheduling.priority = update.priority
            if update.HasField("stop"):
                params.stop.CopyFrom(update.stop)

    def rest(self) -> types_pb2.GenerationSpec:
        """Returns the spec for ResumeGenerate, for any gateway: it holds everything that was received.

        If ids are missing the prompt is left out, so that a gateway without the generation answers with an error
        instead of starting it again from the beginning.
        """
        assert self.accepted is not None
        rest = types_pb2.GenerationSpec()
        if self._received.has_all_ids:
            rest.CopyFrom(self.spec)
            rest.ClearField("credit_window")
            rest.model, rest.revision = self.accepted.model, self.accepted.revision
            params = self.accepted.params
            for name in _EFFECTIVE:
                if params.HasField(name):  # type: ignore[arg-type] # each a field of it
                    getattr(rest, name).CopyFrom(getattr(params, name))
            if self.spec.sampling.max_tokens and not rest.sampling.max_tokens:
                rest.sampling.max_tokens = self.spec.sampling.max_tokens  # Converse accepts before it is known
        rest.resume.generation_id, rest.resume.after_seq = self.accepted.generation_id, self.last_seq
        rest.resume.adapter_digest = self.accepted.adapter_digest
        for index, ids in self._received.ids.items():
            rest.resume.outputs.add(output_index=index, token_ids=ids)
        return rest


def _kind(event: Event) -> str | None:
    if isinstance(event, inference_pb2.ConverseResponse):
        return event.WhichOneof("frame")
    return event.WhichOneof("event")
