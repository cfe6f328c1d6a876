"""The detokenizer stage of the ring: takes Tokens, gives Text; a matched stop string ends the output here.

Text is sent in the turn in which its tokens arrived, or joined with other text at high load (`flush_timer`). A request
may ask for a number of tokens instead (`stream_interval`). The first and the last text of an output are sent at once.
Tokens whose text cannot end their output are decoded when it is sent, those of one message together.
After a stop string the engine still sends tokens until the gateway's Cancel arrives; they are dropped, and their credit
is returned by a Grant.
"""

import dataclasses
from collections.abc import Callable

from sluice_server.services.detokenizer.flush_timer import AT_ONCE, MAX_INTERVAL_S, Alarm, FlushTimer
from sluice_server.services.detokenizer.joined import joined, text_of
from sluice_server.services.detokenizer.output import Output, OutputProgress
from sluice_server.services.detokenizer.records import Records
from sluice_server.services.faults import fault
from sluice_server.services.messages.details import Scored
from sluice_server.services.messages.messages import (
    Cancel,
    Envelope,
    Failed,
    Grant,
    Message,
    OpenSerials,
    Result,
    Text,
    Tokens,
    failed,
)
from sluice_server.services.messages.processes import Probe, Role
from sluice_server.services.messages.work import unpack_ids
from sluice_server.services.ring.leases import Leases
from sluice_server.services.telemetry import names
from sluice_server.services.telemetry.logs import about
from sluice_server.services.telemetry.phases import Phase, Record, Value
from sluice_server.services.tokenizer.encoding import TextEncoder

Emit = Callable[[Message], None]
MAX_WAIT_S = 1.0  # of text that waits for the tokens of a `stream_interval`: without new tokens it would wait for ever


@dataclasses.dataclass(slots=True, eq=False)
class _Output:
    """The state of one output."""

    output: Output
    pace: "FlushTimer[_Output]"  # the flush timer of its gateway
    start: float
    stream_interval: int = 0  # new tokens after which text is sent; 0: when `pace` says
    next_index: int = 0
    busy_s: float = 0.0
    ended: bool = False  # by a stop string: later tokens are dropped
    num_unused: int = 0  # tokens after the stop string
    resumed_at_end: OutputProgress | None = None  # set: the tokens before a resume had already ended the output
    came: list[Tokens] = dataclasses.field(default_factory=list)  # not decoded yet
    waiting: list[Text] = dataclasses.field(default_factory=list)
    num_sent: int = 0  # messages

    @property
    def first_waiting(self) -> int:
        """The index of the first token whose text waits."""
        return self.waiting[0].first_index if self.waiting else self.came[0].first_index


@dataclasses.dataclass(slots=True)
class _Request:
    """The outputs of one request, in its newest attempt."""

    envelope: Envelope
    outputs: dict[int, _Output] = dataclasses.field(default_factory=dict)


class DetokenizerStage:
    """Turns tokens into text for each output of each request."""

    def __init__(
        self,
        encoder: TextEncoder,
        emit: Emit,
        record: Record,
        leases: Leases | None = None,
        timer: Alarm = AT_ONCE,
        max_interval_s: float = MAX_INTERVAL_S,
    ) -> None:
        """`leases` say which gateways are alive. With the default `timer` no text waits beyond the next turn;
        `max_interval_s`: see `FlushTimer`."""
        self.progress = 0
        self.num_late = 0  # tokens dropped: their output had ended, or its first message was missing
        self._encoder = encoder
        self._emit = emit
        self._record = record
        self._records = Records(encoder.pieces)
        self._leases = leases or Leases()
        self._timer = timer
        self._max_interval_s = max_interval_s
        self._requests: dict[str, _Request] = {}
        self._paces: dict[str, FlushTimer[_Output]] = {}  # by gateway

    @property
    def num_open(self) -> int:
        """The number of requests with state in this process."""
        return len(self._requests)

    def turn(self) -> bool:
        """Sends the text that is due."""
        for pace in self._paces.values():
            pace.turn()
        return False

    def probed(self, probe: Probe) -> None:
        """Learns from a probe how many requests of its gateway generate: this process may know a part of them only."""
        self._pace_of(probe.origin).num_generating = probe.num_generating

    def reap(self) -> None:
        """Drops requests whose gateway is gone."""
        for request in list(self._requests.values()):
            if self._leases.is_over(request.envelope):
                self._end(request.envelope)

    def handle(self, message: Message) -> None:
        """Handles Tokens, drops the state of requests that ended elsewhere, and forwards all other messages."""
        self.progress += 1
        match message:
            case Tokens():
                self._take(message)
            case Cancel():
                if message.output_index is None:  # a cancelled single output ends by the engine's Tokens
                    self._end(message.envelope)
            case OpenSerials():
                for request in list(self._requests.values()):
                    if message.has_ended(request.envelope):
                        self._end(request.envelope)
            case Failed():
                self._end(message.envelope, message.reason)
                self._emit(message)
            case _:
                self._emit(message)

    def _take(self, message: Tokens) -> None:
        output = self._output(message)
        if output is None or output.ended or message.first_index != output.next_index:
            self.num_late += len(message.ids)
            if output is not None and output.ended:
                output.num_unused += len(message.ids)
            if message.finish is not None:
                self._forget(message)
            return
        if message.prompt is not None:
            self._emit(Result(message.envelope, Scored(self._records.of_prompt(message.prompt))))
        output.came.append(message)
        output.next_index += len(message.ids)
        if message.finish is not None or message.admitted is not None or output.output.may_end:
            self._decode(output)
        if message.admitted is not None or output.ended:
            self._send(output)
        elif output.stream_interval:
            self._wait_for_tokens(output)
        else:
            output.pace.text_came(output)
        if output.ended:
            self._trace(message.envelope, message.output_index, output, self._timer.clock())
        if message.finish is not None:
            self._forget(message)

    def _decode(self, output: _Output) -> None:
        """Turns the tokens that have come into text that waits."""
        start = self._timer.clock()
        came, output.came = output.came, []
        first, last = came[0], came[-1]
        ids = first.ids if first is last else tuple([token for one in came for token in one.ids])
        advance = output.resumed_at_end or output.output.push(ids, last.finish)
        output.num_unused += len(ids) - advance.num_consumed
        output.next_index -= len(ids) - advance.num_consumed
        output.ended = advance.finish is not None
        output.busy_s += self._timer.clock() - start
        output.waiting.append(text_of(came, advance, self._records.of(came, advance.num_consumed), output.busy_s))

    def _wait_for_tokens(self, output: _Output) -> None:
        """Sends the waiting text of an output if it has the tokens of its interval; at the latest after a while."""
        if output.next_index - output.first_waiting >= output.stream_interval:
            self._send(output)
        elif len(output.waiting) + len(output.came) == 1 and self._timer.call_later is not None:
            num_sent = output.num_sent
            self._timer.call_later(MAX_WAIT_S, lambda: self._send_late(output, num_sent))

    def _send_late(self, output: _Output, num_sent: int) -> None:
        """Sends text that has waited for too long; nothing if it was sent meanwhile."""
        if output.num_sent == num_sent:
            self._send(output)

    def _send(self, output: _Output) -> None:
        """Sends the waiting text of an output as one message. Catches exceptions, because a timer may call this."""
        if not output.came and not output.waiting:
            return
        envelope = (output.came or output.waiting)[0].envelope
        output.num_sent += 1
        try:
            if output.came:
                self._decode(output)
            waiting, output.waiting = output.waiting, []
            self._emit(joined(waiting))
        except Exception as error:
            broken = fault(Role.DETOKENIZER, about(envelope), "failed while making text of this request", error)
            self._end(envelope)
            self._emit(failed(envelope, broken))

    def _output(self, message: Tokens) -> _Output | None:
        """Returns the state of the message's output, or None for a message without state.

        The first message of an attempt creates it, from the options in `admitted`.
        """
        envelope = message.envelope
        request = self._requests.get(envelope.request_id)
        if request is not None and request.envelope.attempt == envelope.attempt:
            output = request.outputs.get(message.output_index)
            if output is not None:
                return output
        if message.admitted is None or (request is not None and envelope.attempt < request.envelope.attempt):
            return None
        if request is None or request.envelope.attempt < envelope.attempt:  # a later attempt replaces all of it
            self._leases.seen(envelope.origin, envelope.epoch)
            request = self._open(envelope)
        name, admitted = f"{envelope.request_id}/{message.output_index}", message.admitted
        made = Output(self._encoder, name, admitted.stops, admitted.text)
        output = _Output(made, self._paces[envelope.origin], self._timer.clock(), admitted.text.stream_interval)
        if admitted.resumed:  # its text was emitted before: continue after it
            resumed = unpack_ids(admitted.resumed)
            before = output.output.push(resumed, None)
            output.next_index = len(resumed)
            if before.finish is not None:
                output.resumed_at_end = OutputProgress("", 0, before.finish, before.stop_match)
        request.outputs[message.output_index] = output
        return output

    def _open(self, envelope: Envelope) -> _Request:
        """Creates the state of an attempt; replaces an earlier one."""
        if envelope.request_id in self._requests:
            self._close(self._requests[envelope.request_id])
        self._pace_of(envelope.origin).num_open += 1
        request = self._requests[envelope.request_id] = _Request(envelope)
        return request

    def _pace_of(self, origin: str) -> "FlushTimer[_Output]":
        """Returns the flush timer of a gateway."""
        if origin not in self._paces:
            self._paces[origin] = FlushTimer(self._send, self._timer, self._max_interval_s)
        return self._paces[origin]

    def _close(self, request: _Request) -> None:
        """Drops the state of a request, with the text that waits."""
        del self._requests[request.envelope.request_id]
        self._paces[request.envelope.origin].num_open -= 1
        for output in request.outputs.values():
            output.came, output.waiting = [], []

    def _forget(self, message: Tokens) -> None:
        """Drops the state of an output after the engine has sent its last token; returns unused credit."""
        request = self._requests.get(message.envelope.request_id)
        if request is None or request.envelope.attempt != message.envelope.attempt:
            return
        output = request.outputs.pop(message.output_index, None)
        if output is not None and output.num_unused:  # other outputs of the request may wait for this credit
            self._emit(Grant(message.envelope, output.num_unused))
        if not request.outputs:
            self._close(request)

    def _end(self, envelope: Envelope, error: str = "") -> None:
        """Drops a request, unless a later attempt has begun. Open outputs end: failed with `error`, else cancelled."""
        request = self._requests.get(envelope.request_id)
        if request is None or request.envelope.attempt > envelope.attempt:
            return
        if error:  # the client still gets the text so far
            for output in request.outputs.values():
                self._send(output)
        if envelope.request_id in self._requests:  # else sending failed, and has closed it
            self._close(request)
        now = self._timer.clock()
        for index, output in request.outputs.items():
            if not output.ended:
                self._trace(request.envelope, index, output, now, error)

    def _trace(self, envelope: Envelope, index: int, output: _Output, end_s: float, cut_by: str | None = None) -> None:
        """Records the phase of an output; `cut_by` is the error, or "" for a cancel; None: it came to its end."""
        attributes: dict[str, Value] = {names.OUTPUT: index, names.NUM_TOKENS: output.next_index}
        if cut_by is not None:
            attributes[names.CANCELLED] = not cut_by
        phase = Phase(names.SPAN_DETOKENIZE, output.start, end_s, attributes, error=cut_by or "")
        self._record(envelope, phase)
