"""Converts events of the generation service to responses of the Open Inference Protocol. Pure."""

from collections.abc import Iterator

from sluice_server.engine.request import FinishReason
from sluice_server.services.gateway.generation.events import (
    AcceptedEvent,
    DeltaEvent,
    FinishedEvent,
    OutputFinishedEvent,
    StreamEvent,
)
from sluice_server.services.gateway.oip.contract import open_inference_pb2 as oip
from sluice_server.services.gateway.oip.tensors import add_output
from sluice_server.services.gateway.oip.translate import (
    FINAL,
    FINISH_REASON,
    NUM_INPUT,
    NUM_OUTPUT,
    TEXT_OUTPUT,
    VERSION,
    InferRequest,
)

UNFINISHED = "None"  # the value of vLLM's backend for an unfinished output


class InferResponses:
    """The responses of one generation: one per delta, or one for all."""

    def __init__(self, asked: InferRequest) -> None:
        self._asked = asked
        self._model = ""
        self._text = asked.prefix
        self._num_tokens = 0
        self._reason = UNFINISHED
        self._num_input = 0

    def of(self, event: StreamEvent) -> Iterator[oip.ModelInferResponse]:
        """Yields the responses that one event adds."""
        match event:
            case AcceptedEvent():
                self._model = event.model
            case DeltaEvent():
                self._text += "".join([one.text for one in event.texts])
                self._num_tokens += sum([len(one.tokens) for one in event.texts])
                if self._asked.streams:
                    yield self._flushed()
            case OutputFinishedEvent():
                self._reason = "length" if event.last.finish is FinishReason.LENGTH else "stop"
            case FinishedEvent():
                self._num_input = event.used.num_prompt
                yield from self._last()

    def _last(self) -> Iterator[oip.ModelInferResponse]:
        """Yields the last responses: in a stream only requested outputs that are known last; otherwise everything."""
        asked = self._asked
        if not asked.streams or asked.extras & {FINISH_REASON.name, NUM_INPUT.name}:
            yield self._flushed()
        if asked.marks_end:
            yield self._response(is_last=True)

    def _flushed(self) -> oip.ModelInferResponse:
        response, extras = self._response(is_last=False), self._asked.extras
        add_output(response, TEXT_OUTPUT, self._text)
        if FINISH_REASON.name in extras:
            add_output(response, FINISH_REASON, self._reason)
        if NUM_INPUT.name in extras and self._num_input:
            add_output(response, NUM_INPUT, self._num_input)
        if NUM_OUTPUT.name in extras:
            add_output(response, NUM_OUTPUT, self._num_tokens)
        self._text, self._num_tokens = "", 0
        return response

    def _response(self, *, is_last: bool) -> oip.ModelInferResponse:
        response = oip.ModelInferResponse(model_name=self._model, model_version=VERSION, id=self._asked.id)
        if self._asked.marks_end:
            response.parameters[FINAL].bool_param = is_last
        return response
