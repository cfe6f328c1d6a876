"""The operations that this gateway asks of single processes of the ring, and their answers as they come.

Depends on no transport. An operation ends with its caller: the process is told to stop once its answers are not read
any more. It fails if its process is lost, or if an answer is.
"""

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncGenerator, Callable, Collection, Set
from typing import Protocol

from sluice_server.engine.errors import ServiceError, stage_lost
from sluice_server.services.gateway.contract.errors import not_found
from sluice_server.services.messages.control import (
    Asked,
    Done,
    More,
    Operation,
    OperationAnswer,
    Progress,
    Refused,
    Stop,
    Work,
)

PATIENCE_S = 60.0  # for an answer, beyond the time that the work itself takes: a step may be long


class CarriesOut(Protocol):
    """What has processes carry out work."""

    def carry_out(self, target: str, work: Work, takes_s: float) -> AsyncGenerator[Progress, None]:
        """Yields the answers of a process to work that takes so many seconds. Raises ServiceError."""


@dataclasses.dataclass(slots=True)
class _Open:
    """An operation that is not done."""

    target: str
    answers: asyncio.Queue[OperationAnswer | ServiceError]


class RemoteOperations:
    """The operations of one gateway."""

    def __init__(
        self, gateway_id: str, epoch: int, processes: Collection[str], emit: Callable[[Operation], None]
    ) -> None:
        """`processes`: ids of all processes of the ring."""
        self._gateway_id = gateway_id
        self._epoch = epoch
        self.processes = frozenset(processes) | {gateway_id}
        self._emit = emit
        self._numbers = itertools.count(1)
        self._open: dict[int, _Open] = {}

    def change_engines(self, left: Set[str], engines: Set[str]) -> None:
        """Takes these engines for those of the ring; the operations of those that left fail."""
        self.processes = (self.processes - left) | engines
        if left:
            self.lost(left)

    def check(self, process: str) -> None:
        """Raises ServiceError PROCESS_NOT_FOUND for a process that is not one of the ring."""
        if process not in self.processes:
            raise not_found("process", process, f"this service has {', '.join(sorted(self.processes))}")

    async def carry_out(self, target: str, work: Work, takes_s: float) -> AsyncGenerator[Progress, None]:
        """Yields the answers of a process to work that takes so many seconds. Raises ServiceError."""
        self.check(target)
        call = next(self._numbers)
        opened = self._open[call] = _Open(target, asyncio.Queue())
        asked: Asked = work
        is_over = False
        try:
            for number in itertools.count():
                self._ask(call, target, asked, number)
                try:
                    async with asyncio.timeout(takes_s + PATIENCE_S):
                        answer = await opened.answers.get()
                except TimeoutError:
                    raise stage_lost(target) from None
                if isinstance(answer, ServiceError):
                    raise answer
                is_over = isinstance(answer.value, Done | Refused)
                if isinstance(answer.value, Refused):
                    raise answer.value.error()
                if answer.number != number:
                    raise stage_lost(target)
                if isinstance(answer.value, Done):
                    return
                yield answer.value
                asked = More()
        finally:
            del self._open[call]
            if not is_over:
                self._ask(call, target, Stop(), 0)

    def handle(self, answer: OperationAnswer) -> None:
        """Takes an answer from the ring; one that is not awaited any more is dropped."""
        opened = self._open.get(answer.call)
        if opened is not None and answer.epoch == self._epoch and answer.source == opened.target:
            opened.answers.put_nowait(answer)

    def lost(self, names: Set[str]) -> None:
        """Fails the operations of these processes, which have ended; without names, of all."""
        for opened in self._open.values():
            if not names or opened.target in names:
                opened.answers.put_nowait(stage_lost(opened.target))

    def _ask(self, call: int, target: str, work: Asked, number: int) -> None:
        self._emit(Operation(self._gateway_id, self._epoch, call, target, work, number))
