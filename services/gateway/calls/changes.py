"""What a client may say of its running generation, from the contract to the ring: checked here, as far as that goes.

Frames of Converse in, messages behind the request out. Knows no stream; the engine checks again, on exact tokens.
"""

from sluice.v1 import inference_pb2

from engine.checks import check_credit, check_priority
from engine.errors import Code, ServiceError, invalid, unsupported
from engine.request import SamplingParams
from services.gateway.access.admission import BYTES_PER_TOKEN
from services.gateway.contract import knobs, translate
from services.gateway.requests.desk import RequestManager
from services.gateway.requests.open_requests import OpenRequest
from services.messages.messages import Append, CloseInput, Grant, Update
from services.messages.work import Generate, TextPrompt, TokenPrompt

MAX_DEADLINE_S = 24 * 3600.0


class GenerationUpdates:
    """Tells the ring what the client says of one generation. All raise `ServiceError` for what cannot be."""

    def __init__(self, desk: RequestManager, request: OpenRequest) -> None:
        assert isinstance(request.asked.work, Generate)
        self._desk = desk
        self._request = request
        self._params: SamplingParams = request.asked.work.params
        self.is_input_open = request.asked.work.scheduling.is_open
        prompt = request.asked.work.prompt
        self._num_bytes = len(prompt.text.encode()) if isinstance(prompt, TextPrompt) else 0
        self._num_ids = len(prompt.ids) // 4 if isinstance(prompt, TokenPrompt) else 0

    def append(self, frame: inference_pb2.Append) -> None:
        """More prompt."""
        if not self.is_input_open:
            text = "append: the input of this generation is closed; open it with keep_input_open"
            raise ServiceError(Code.FAILED_PRECONDITION, "INPUT_CLOSED", text)
        piece, num_tokens = self._piece(frame)
        if self._params.max_tokens:  # otherwise its output shrinks by as much
            self._desk.reserve_more(self._request, num_tokens)
        self._desk.change(self._request, Append(self._request.envelope, piece))

    def close_input(self) -> None:
        """The prompt is complete."""
        if self.is_input_open:
            self.is_input_open = False
            self._desk.change(self._request, CloseInput(self._request.envelope))

    def grant(self, frame: inference_pb2.Grant) -> None:
        """More credit."""
        request, limit = self._request, self._desk.settings.limits.max_credit
        if request.allowed is None:
            raise invalid("grant.tokens", "the generation was opened without credit_window: its credit is unlimited")
        if not frame.tokens:
            raise invalid("grant.tokens", f"0 is not in [1, {limit}]", limit=1)
        unused = request.allowed + frame.tokens - request.num_tokens
        check_credit(unused, self._desk.settings.limits, "grant.tokens")
        request.allowed += frame.tokens
        self._desk.change(request, Grant(request.envelope, frame.tokens))

    def update(self, frame: inference_pb2.Update) -> None:
        """Other parameters."""
        if frame.HasField("stop"):
            raise unsupported("update.stop", "update.stop is not supported by this server: leave it out")
        max_tokens = self._max_tokens(frame) if frame.HasField("max_tokens") else None
        priority = frame.priority if frame.HasField("priority") else None
        if priority is not None:
            check_priority(priority, self._desk.settings.limits)
        left_s = (
            knobs.seconds("update.deadline", frame.deadline, MAX_DEADLINE_S) if frame.HasField("deadline") else None
        )
        effective = self._request.asked.effective
        if priority is not None and effective is not None:
            effective.scheduling.priority = priority
        self._desk.change(self._request, Update(self._request.envelope, max_tokens, priority, left_s))

    def _piece(self, frame: inference_pb2.Append) -> tuple[TextPrompt | TokenPrompt, int]:
        """The piece and its size in tokens: exact for ids, estimated for text."""
        settings = self._desk.settings
        match frame.WhichOneof("piece"):
            case "text":
                size = len(frame.text.encode())
                if not size:
                    raise invalid("append.text", "is empty; send at least one byte")
                self._num_bytes += size
                translate.check_bytes(self._num_bytes, settings, "append.text")
                return TextPrompt(frame.text), size // BYTES_PER_TOKEN + 1
            case "token_ids":
                ids = frame.token_ids.ids
                if not ids:
                    raise invalid("append.token_ids", "is empty; send at least one id")
                packed = translate.pack_checked("append.token_ids", ids, settings, self._num_ids)
                self._num_ids += len(ids)
                return TokenPrompt(packed), len(ids)
            case "message":
                raise unsupported("append.message", "append.message is not supported by this server: send text")
            case _:
                raise invalid("append.piece", "is missing; send text or token_ids")

    def _max_tokens(self, frame: inference_pb2.Update) -> int:
        asked, low = frame.max_tokens, max(1, self._params.min_tokens)
        high = self._desk.settings.limits.context_length
        if not low <= asked <= high:
            raise invalid("update.max_tokens", f"{asked} is not in [{low}, {high}]", limit=low if asked < low else high)
        more = asked - (self._request.max_tokens or self._params.max_tokens or high)
        if more > 0:
            self._desk.reserve_more(self._request, more * self._params.num_sequences)
        self._request.max_tokens = asked
        return asked
