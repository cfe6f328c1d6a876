"""One generation's way through a call of this protocol: stands where our own handlers expect their gRPC context.

What they write is turned into responses; a refusal becomes an exception for whoever opened the lane. So this protocol
has no generation loop of its own: deadlines, quotas, slow readers and cancelling are those of StreamGenerate.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import NoReturn

import grpc
from sluice.v1 import inference_pb2, types_pb2

from services.gateway.access.metadata import Context
from services.gateway.oip.contract import open_inference_pb2 as oip
from services.gateway.oip.tensors import add_output
from services.gateway.oip.translate import (
    FINAL,
    FINISH_REASON,
    NUM_INPUT,
    NUM_OUTPUT,
    TEXT_OUTPUT,
    VERSION,
    InferRequest,
)

Metadata = Sequence[tuple[str, str | bytes]]
UNFINISHED = "None"  # what vLLM's backend says of an output that goes on
_REASONS = {types_pb2.FINISH_REASON_LENGTH: "length"}


class CallAborted(Exception):
    """The handler ended its call with this status."""

    def __init__(self, code: grpc.StatusCode, message: str, trailers: Metadata) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.trailers = trailers


class Lane:
    """The part of a context that a streaming handler uses; `send` takes each response."""

    def __init__(
        self, context: Context, asked: InferRequest, send: Callable[[oip.ModelInferResponse], Awaitable[None]]
    ) -> None:
        self._context = context
        self._asked = asked
        self._send = send
        self._trailers: Metadata = ()
        self._model = ""
        self._text = asked.prefix
        self._num_tokens = 0
        self._reason = UNFINISHED
        self._num_input = 0

    def invocation_metadata(self) -> object:
        """Of the whole call."""
        return self._context.invocation_metadata()

    def time_remaining(self) -> float | None:
        """Of the whole call."""
        return self._context.time_remaining()

    def set_trailing_metadata(self, trailers: Metadata) -> None:
        """Kept for the refusal: a call of many generations has none of its own."""
        self._trailers = trailers

    def trailing_metadata(self) -> Metadata:
        """As set."""
        return self._trailers

    async def abort(self, code: grpc.StatusCode, message: str, trailers: Metadata) -> NoReturn:
        """The handler refuses or fails."""
        raise CallAborted(code, message, trailers)

    async def write(self, message: inference_pb2.StreamGenerateResponse) -> None:
        """One event of the generation."""
        match message.WhichOneof("event"):
            case "accepted":
                self._model = message.accepted.model
            case "delta":
                self._text += message.delta.text
                self._num_tokens += message.delta.consumed
                if self._asked.streams:
                    await self._flush()
            case "output_finished":
                self._reason = _REASONS.get(message.output_finished.finish_reason, "stop")
            case "finished":
                self._num_input = message.finished.usage.prompt_tokens
                await self._finish()

    async def _finish(self) -> None:
        """In a stream only what was asked for and is known last; otherwise everything."""
        asked = self._asked
        if not asked.streams or asked.extras & {FINISH_REASON.name, NUM_INPUT.name}:
            await self._flush()
        if asked.marks_end:
            await self._send(self._response(is_last=True))

    async def _flush(self) -> None:
        response, extras = self._response(is_last=False), self._asked.extras
        add_output(response, TEXT_OUTPUT, self._text)
        if FINISH_REASON.name in extras:
            add_output(response, FINISH_REASON, self._reason)
        if NUM_INPUT.name in extras and self._num_input:
            add_output(response, NUM_INPUT, self._num_input)
        if NUM_OUTPUT.name in extras:
            add_output(response, NUM_OUTPUT, self._num_tokens)
        self._text, self._num_tokens = "", 0
        await self._send(response)

    def _response(self, is_last: bool) -> oip.ModelInferResponse:
        response = oip.ModelInferResponse(model_name=self._model, model_version=VERSION, id=self._asked.id)
        if self._asked.marks_end:
            response.parameters[FINAL].bool_param = is_last
        return response
