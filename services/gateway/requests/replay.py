"""What is needed to send one request again: the client's changes since it was opened, and how its attempts went.

A restarted process gets the request with all changes applied to the work, so that prompt and limits are complete before
the next token is sampled. Pure: time is passed in.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence

import msgspec

from sluice_server.services.gateway.requests.output_state import OutputState
from sluice_server.services.messages.messages import Append, Cancel, Change, CloseInput, Envelope, Grant, Update
from sluice_server.services.messages.work import Generate, TextPrompt, TokenPrompt, Work


class Replay:
    """The replay state of one request.

    Attributes:
        changes: the client's changes since the request was opened, in the order in which they were sent.
        losses: how often each process, by id, ended while it worked on the request.
        num_futile: attempts in a row that brought no token.
    """

    def __init__(self, started_s: float, time_left_s: float | None, num_tokens: int) -> None:
        """`num_tokens`: tokens that the request has when it is first sent."""
        self.changes: list[Change | Cancel] = []
        self.losses: Counter[str] = Counter()
        self.num_futile = 0
        self._num_sent_changes = 0  # in the present attempt
        self._num_sent_tokens = num_tokens  # that the request had when it was last sent
        self._deadline_s = None if time_left_s is None else started_s + time_left_s

    def is_unproven(self, num_tokens: int) -> bool:
        """Whether no token has come since the request was last sent."""
        return num_tokens == self._num_sent_tokens

    def is_overdue(self, now_s: float) -> bool:
        """Whether the deadline has passed."""
        return self._deadline_s is not None and now_s > self._deadline_s

    def set_time_left(self, seconds: float, now_s: float) -> None:
        """Sets the deadline to `seconds` from now; later attempts carry it."""
        self._deadline_s = now_s + seconds

    def restamped(self, envelope: Envelope, now_s: float) -> Envelope:
        """Returns an envelope with the time that is left now."""
        left_s = None if self._deadline_s is None else self._deadline_s - now_s
        return msgspec.structs.replace(envelope, time_left_s=left_s)

    def record(self, change: Change | Cancel) -> Change | Cancel:
        """Records a change and returns it with its index in the attempt. Consecutive grants are merged into one."""
        if not isinstance(change, Cancel):
            change = msgspec.structs.replace(change, index=self._num_sent_changes)
            self._num_sent_changes += 1
        last = self.changes[-1] if self.changes else None
        if isinstance(change, Grant) and isinstance(last, Grant):
            self.changes[-1] = Grant(last.envelope, last.tokens + change.tokens)
        else:
            self.changes.append(change)
        return change

    def next_attempt(self, envelope: Envelope, num_tokens: int, now_s: float, engine: str) -> Envelope:
        """Begins another attempt, by `engine`; returns its envelope."""
        self._num_sent_changes = 0
        self.num_futile = self.num_futile + 1 if self.is_unproven(num_tokens) else 0
        self._num_sent_tokens = num_tokens
        envelope = self.restamped(envelope, now_s)
        return msgspec.structs.replace(envelope, attempt=envelope.attempt + 1, engine=engine)

    def work_now(self, work: Work, credit: int | None) -> Work:
        """Returns the work with every change applied; `credit` counts the tokens that may be sampled from now on."""
        if not isinstance(work, Generate):
            return work
        params, scheduling = work.params, work.scheduling
        more: list[TextPrompt | TokenPrompt] = []
        for change in self.changes:
            match change:
                case Append(piece=piece):
                    more.append(piece)
                case CloseInput():
                    scheduling = msgspec.structs.replace(scheduling, is_open=False)
                case Update(max_tokens=max_tokens, priority=priority):
                    if max_tokens is not None:
                        params = dataclasses.replace(params, max_tokens=max_tokens)
                    if priority is not None:
                        scheduling = msgspec.structs.replace(scheduling, priority=priority)
        if credit is not None:
            scheduling = msgspec.structs.replace(scheduling, credit=max(0, credit))
        return msgspec.structs.replace(work, params=params, scheduling=scheduling, more=tuple(more))

    def cancels(self, envelope: Envelope, outputs: Sequence[OutputState]) -> list[Cancel]:
        """Returns Cancels, for the attempt of `envelope`, of single outputs whose requested end has not come."""
        asked = [one.output_index for one in self.changes if isinstance(one, Cancel)]
        return [
            Cancel(envelope, index)
            for index in dict.fromkeys(asked)
            if index is not None and outputs[index].last is None
        ]
