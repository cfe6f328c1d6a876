"""What clients change of their running requests: credit, prompt, limits, single outputs. Sent into the ring by `emit`,
which never blocks."""

from collections.abc import Callable

from sluice_server.engine.errors import invalid
from sluice_server.services.gateway.requests.adapters import is_unbound
from sluice_server.services.gateway.requests.books import Books
from sluice_server.services.gateway.requests.hedges import Hedges
from sluice_server.services.gateway.requests.open_request import OpenRequest, RequestStatus
from sluice_server.services.gateway.requests.registry import OpenRequests
from sluice_server.services.messages.messages import Cancel, Change, Grant, Message, Update


class RequestChanges:
    """The changes of the requests of one manager."""

    def __init__(
        self,
        requests: OpenRequests,
        hedges: Hedges,
        books: Books,
        emit: Callable[[Message], None],
        clock: Callable[[], float],
    ) -> None:
        self._requests = requests
        self._hedges = hedges
        self._books = books
        self._emit = emit
        self._clock = clock

    def change(self, request: OpenRequest, change: Change | Cancel) -> None:
        """Records a client's change of its running request and sends it into the ring."""
        self._hedges.drop(request)  # it would have to hear of it
        numbered = request.replay.record(change)
        if isinstance(change, Update) and change.time_left_s is not None:
            request.replay.set_time_left(change.time_left_s, self._clock())
        if not is_unbound(request.asked):
            self._emit(numbered)

    def grant(self, request: OpenRequest, num_tokens: int) -> None:
        """Adds `num_tokens` to the credit of a request."""
        request.credit.grant(num_tokens)
        self.change(request, Grant(request.envelope, num_tokens))

    def lift_credit(self, request: OpenRequest, most: int) -> None:
        """Raises the credit of a request to `most`, because its new reader has no call that grants more."""
        unused = request.credit.unused(request.num_tokens)
        if unused is None or request.outcome is not None:
            return
        if most > unused:
            self.grant(request, most - unused)

    def reserve_more(self, request: OpenRequest, num_tokens: int) -> None:
        """Reserves more tokens for a grown prompt or `max_tokens`. Raises `ServiceError` QUEUE_FULL."""
        self._books.admission.grow(num_tokens)
        request.accounting.reserved += num_tokens

    def take_back(self, unused: Grant) -> None:
        """Returns the credit of tokens that were sampled behind a stop string: they may be spent again."""
        request = self._requests.get(unused.envelope.request_id)
        if request is None or request.outcome is not None or request.credit.allowed is None:
            return
        if unused.envelope.attempt == request.envelope.attempt:
            self.change(request, Grant(request.envelope, unused.tokens))

    def cancel_output(self, request: OpenRequest, index: int) -> tuple[RequestStatus, RequestStatus]:
        """Asks the engine to end one output. The end arrives like any other. Raises `ServiceError`."""
        if index >= len(request.outputs):
            raise invalid("output_index", f"{index}: this generation has {len(request.outputs)} outputs")
        if request.asked.is_search:
            raise invalid(
                "output_index", "best_of and beam search choose among their outputs: cancel the whole generation"
            )
        if request.outputs[index].last is not None:
            return RequestStatus.FINISHED, RequestStatus.FINISHED
        self.change(request, Cancel(envelope=request.envelope, output_index=index))
        return RequestStatus.RUNNING, RequestStatus.CANCELLED
