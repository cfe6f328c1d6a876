"""The detokenizer stage of the ring: takes Tokens, gives Text; a matched stop string ends the output here.

Text is sent in the turn in which its tokens arrived, or joined with other text at high load (`flush_timer`). A request
may ask for a number of tokens instead (`stream_interval`). The first and the last text of an output are sent at once.
After a stop string the engine still sends tokens until the gateway's Cancel arrives; they are dropped, and their credit
is returned by a Grant.
"""

import dataclasses
from collections.abc import Callable

from sluice_server.services.detokenizer.flush_timer import AT_ONCE, MAX_INTERVAL_S, Alarm, FlushTimer
from sluice_server.services.detokenizer.joined import joined
from sluice_server.services.detokenizer.output import Output, OutputProgress
from sluice_server.services.detokenizer.records import Records
from sluice_server.services.faults import fault
from sluice_server.services.messages.details import Scored, Timings
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
from sluice_server.services.messages.processes import Role
from sluice_server.services.messages.work import unpack_ids
from sluice_server.services.ring.leases import Leases
from sluice_server.services.telemetry import names
from sluice_server.services.telemetry.logs import about
from sluice_server.services.telemetry.phases import Phase, Record
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
    waiting: list[Text] = dataclasses.field(default_factory=list)


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
        start = self._timer.clock()
        output = self._output(message, start)
        if output is None or output.ended or message.first_index != output.next_index:
            self.num_late += len(message.ids)
            if output is not None and output.ended:
                output.num_unused += len(message.ids)
            if message.finish is not None:
                self._forget(message)
            return
        if message.prompt is not None:
            self._emit(Result(message.envelope, Scored(self._records.of_prompt(message.prompt))))
        advance = output.resumed_at_end or output.output.push(message.ids, message.finish)
        output.next_index += advance.num_consumed
        output.num_unused += len(message.ids) - advance.num_consumed
        output.ended = advance.finish is not None
        now = self._timer.clock()
        output.busy_s += now - start
        output.waiting.append(self._text(message, advance, output.busy_s))
        if message.admitted is not None or advance.finish is not None:
            self._send(output)
        elif output.stream_interval:
            self._wait_for_tokens(output)
        else:
            output.pace.text_came(output)
        if advance.finish is not None:
            self._trace(message.envelope, message.output_index, output, Phase(names.SPAN_DETOKENIZE, output.start, now))
        if message.finish is not None:
            self._forget(message)

    def _text(self, message: Tokens, advance: OutputProgress, busy_s: float) -> Text:
        return Text(
            envelope=message.envelope,
            first_index=message.first_index,
            tokens=self._records.of(message, advance.num_consumed),
            text=advance.text,
            output_index=message.output_index,
            admitted=message.admitted,
            finish=advance.finish,
            stop_match=advance.stop_match,
            timings=_timings(message.timings, busy_s) if advance.finish is not None else None,
            reasoning=advance.reasoning,
            num_reasoning=advance.num_reasoning,
            tool_calls=advance.tool_calls,
            tool_call_parts=advance.tool_call_parts,
            drafts=((message.num_drafted, message.num_accepted),) if message.num_drafted else (),
        )

    def _wait_for_tokens(self, output: _Output) -> None:
        """Sends the waiting text of an output if it has the tokens of its interval; at the latest after a while."""
        waiting = output.waiting
        if output.next_index - waiting[0].first_index >= output.stream_interval:
            self._send(output)
        elif len(waiting) == 1 and self._timer.call_later is not None:
            self._timer.call_later(MAX_WAIT_S, lambda: self._send_late(output, waiting))

    def _send_late(self, output: _Output, waiting: list[Text]) -> None:
        """Sends text that has waited for too long; nothing if it was sent meanwhile."""
        if output.waiting is waiting:
            self._send(output)

    def _send(self, output: _Output) -> None:
        """Sends the waiting text of an output as one message. Catches exceptions, because a timer may call this."""
        waiting, output.waiting = output.waiting, []
        if not waiting:
            return
        envelope = waiting[0].envelope
        try:
            self._emit(joined(waiting))
        except Exception as error:
            broken = fault(Role.DETOKENIZER, about(envelope), "failed while joining text of this request", error)
            self._end(envelope)
            self._emit(failed(envelope, broken))

    def _output(self, message: Tokens, now: float) -> _Output | None:
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
        output = _Output(made, self._paces[envelope.origin], now, admitted.text.stream_interval)
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
        if envelope.origin not in self._paces:
            self._paces[envelope.origin] = FlushTimer(self._send, self._timer, self._max_interval_s)
        self._paces[envelope.origin].num_open += 1
        request = self._requests[envelope.request_id] = _Request(envelope)
        return request

    def _close(self, request: _Request) -> None:
        """Drops the state of a request, with the text that waits."""
        del self._requests[request.envelope.request_id]
        self._paces[request.envelope.origin].num_open -= 1
        for output in request.outputs.values():
            output.waiting = []

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
        self._close(request)
        now = self._timer.clock()
        for index, output in request.outputs.items():
            if not output.ended:
                phase = Phase(names.SPAN_DETOKENIZE, output.start, now, {names.CANCELLED: not error}, error=error)
                self._trace(request.envelope, index, output, phase)

    def _trace(self, envelope: Envelope, index: int, output: _Output, phase: Phase) -> None:
        attributes = {**phase.attributes, names.OUTPUT: index, names.NUM_TOKENS: output.next_index}
        self._record(envelope, phase._replace(attributes=attributes))


def _timings(timings: Timings | None, busy_s: float) -> Timings:
    """Returns the engine's timings with this stage's own; zeros for the engine's if a stop string ended the output
    here."""
    known = timings or Timings()
    return Timings(known.tokenize_s, known.queue_s, known.prefill_s, known.decode_s, busy_s, known.num_preemptions)
