"""Carries out the operations that gateways ask of this process, each in a task of the loop, and sends their answers.

An operation is an asynchronous generator of answers. One that is not awaited by its gateway any more is cancelled: its
caller left, or the gateway is gone. What it holds is released in its own `finally`.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Callable
from typing import Any, TypeAlias

from sluice_server.engine.errors import Code, ServiceError, invalid, not_open
from sluice_server.services.faults import operation_fault
from sluice_server.services.messages.control import (
    Answer,
    Done,
    More,
    Operation,
    OperationAnswer,
    Progress,
    Refused,
    Stop,
)
from sluice_server.services.messages.messages import Envelope
from sluice_server.services.ring.leases import Leases

Answers: TypeAlias = AsyncGenerator[Progress, None]
Key: TypeAlias = tuple[str, int, int]  # origin, its epoch, number of the call


@dataclasses.dataclass(slots=True)
class _Running:
    """An operation under way."""

    kind: type  # of its work
    wanted: asyncio.Semaphore  # answers that the gateway waits for
    task: asyncio.Task[None] | None = None


class Operations:
    """The operations of one process: one of each kind at a time."""

    def __init__(self, process_id: str, leases: Leases, emit: Callable[[OperationAnswer], None]) -> None:
        self._process_id = process_id
        self._leases = leases
        self._emit = emit
        self._kinds: dict[type, Callable[[Any], Answers]] = {}
        self._running: dict[Key, _Running] = {}

    def serve(self, kind: type, carry_out: Callable[[Any], Answers]) -> None:
        """Carries out work of this type by `carry_out` from now on."""
        self._kinds[kind] = carry_out

    def handle(self, operation: Operation) -> None:
        """Starts an operation, lets it go on, or ends it."""
        key = operation.origin, operation.epoch, operation.call
        running = self._running.get(key)
        if isinstance(operation.work, Stop):
            if running is not None and running.task is not None:
                running.task.cancel()
        elif isinstance(operation.work, More):
            if running is None:  # this process has started again since
                self._answer(operation, operation.number, Refused.of(not_open(f"{operation.call}")))
            else:
                running.wanted.release()
        elif running is None:
            self._leases.seen(operation.origin, operation.epoch)
            made = self._running[key] = _Running(type(operation.work), asyncio.Semaphore(1))
            made.task = asyncio.get_running_loop().create_task(self._run(operation, made, key), name="operation")

    def reap(self) -> None:
        """Ends the operations whose gateway is gone; called periodically."""
        for (origin, epoch, _), running in list(self._running.items()):
            if running.task is not None and self._leases.is_over(Envelope("", origin, epoch=epoch)):
                running.task.cancel()

    async def close(self) -> None:
        """Ends all operations, and waits until they have released what they hold."""
        tasks = [running.task for running in self._running.values() if running.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, operation: Operation, running: _Running, key: Key) -> None:
        number = 0
        ended: Answer = Done()
        try:
            async with contextlib.aclosing(self._begin(operation)) as answers:
                async for answer in answers:
                    await running.wanted.acquire()
                    self._answer(operation, number, answer)
                    number += 1
            await running.wanted.acquire()
        except ServiceError as error:
            ended = Refused.of(error)
        except Exception as error:
            ended = Refused.of(operation_fault(self._process_id, type(operation.work).__name__, error))
        finally:
            del self._running[key]
        self._answer(operation, number, ended)

    def _begin(self, operation: Operation) -> Answers:
        kind = type(operation.work)
        if sum(running.kind is kind for running in self._running.values()) > 1:
            raise is_running(self._process_id, kind.__name__)
        carry_out = self._kinds.get(kind)
        if carry_out is None:
            raise invalid("process", f"{self._process_id} has nothing to do with {kind.__name__}: name another one")
        return carry_out(operation.work)

    def _answer(self, operation: Operation, number: int, value: Answer) -> None:
        origin, epoch, call = operation.origin, operation.epoch, operation.call
        self._emit(OperationAnswer(origin, epoch, call, self._process_id, number, value))


def is_running(process_id: str, kind: str) -> ServiceError:
    """Returns the error for an operation while another one of its kind runs in the process."""
    return ServiceError(
        Code.RESOURCE_EXHAUSTED,
        "OPERATION_RUNNING",
        f"another {kind} of {process_id} is running, and only one can: try again when it has ended",
        details={"process": process_id, "limit": "1"},
        retry_after_s=1.0,
    )
