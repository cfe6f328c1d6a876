"""The operations of a process, and of a gateway that asks for them, over a ring that the test plays."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import pytest

from sluice_server.engine.errors import ServiceError, invalid
from sluice_server.services.gateway import operations as remote
from sluice_server.services.gateway.operations import RemoteOperations
from sluice_server.services.messages.control import (
    Chunk,
    Done,
    Operation,
    OperationAnswer,
    Profile,
    ProfileKind,
    Progress,
    Recording,
    Refused,
)
from sluice_server.services.process.operations import Operations
from sluice_server.services.ring.leases import LEASE_S, Leases

WORK = Profile(ProfileKind.STACKS, 1.0)
EPOCH = 7


class Joined:
    """A gateway and one process; what one emits reaches the other in the loop's next turn."""

    def __init__(self) -> None:
        self.leases = Leases()
        self.log: list[str] = []  # what the operation does
        self.goes_on = asyncio.Event()
        self.fault: Exception | None = None
        self.num = 3
        self.answered: list[OperationAnswer] = []
        self.process = Operations("engine-0", self.leases, self._answer)
        self.process.serve(Profile, self._carry_out)
        self.gateway = RemoteOperations("gateway-0", EPOCH, ["engine-0"], self._ask)
        self.loses = False

    def _ask(self, operation: Operation) -> None:
        asyncio.get_running_loop().call_soon(self.process.handle, operation)

    def _answer(self, answer: OperationAnswer) -> None:
        self.answered.append(answer)
        if not self.loses:
            asyncio.get_running_loop().call_soon(self.gateway.handle, answer)

    async def _carry_out(self, work: Profile) -> AsyncGenerator[Progress, None]:
        self.log.append("begin")
        try:
            yield Recording()
            await self.goes_on.wait()
            if self.fault is not None:
                raise self.fault
            for at in range(self.num):
                yield Chunk(bytes([at]))
                self.log.append(f"sent {at}")
        finally:
            self.log.append("end")

    def parts(self, target: str = "engine-0", takes_s: float = 1.0) -> AsyncGenerator[Progress, None]:
        return self.gateway.carry_out(target, WORK, takes_s)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_answers_come_in_order_and_one_at_a_time() -> None:
    ring = Joined()
    ring.goes_on.set()
    parts = ring.parts()
    assert isinstance(await anext(parts), Recording)
    await settle()
    assert ring.log == ["begin"] and len(ring.answered) == 1  # the next one waits until it is asked for
    rest = [part async for part in parts]
    assert rest == [Chunk(b"\0"), Chunk(b"\1"), Chunk(b"\2")]
    assert ring.log[-1] == "end" and isinstance(ring.answered[-1].value, Done)
    assert [one.number for one in ring.answered] == [0, 1, 2, 3, 4]


async def test_an_operation_ends_with_its_caller() -> None:
    ring = Joined()
    parts = ring.parts()
    await anext(parts)
    await parts.aclose()
    await settle()
    assert ring.log == ["begin", "end"] and not ring.process._running


async def test_an_operation_ends_with_its_gateway() -> None:
    ring = Joined()
    parts = ring.parts()
    await anext(parts)
    ring.leases.pass_time(LEASE_S + 1)
    ring.process.reap()
    await settle()
    assert ring.log == ["begin", "end"]
    ring.gateway.lost({"engine-0"})
    with pytest.raises(ServiceError):
        await anext(parts)


async def test_errors_reach_the_caller_and_a_bug_says_nothing_of_itself() -> None:
    for fault, reason in ((invalid("steps", "no"), "INVALID_PARAMETER"), (ValueError("secret"), "ENGINE_FAULT")):
        ring = Joined()
        ring.fault = fault
        ring.goes_on.set()
        with pytest.raises(ServiceError) as caught:
            [part async for part in ring.parts()]
        assert caught.value.reason == reason and "secret" not in caught.value.message
        assert ring.log == ["begin", "end"] and not ring.process._running


async def test_a_process_takes_one_operation_of_a_kind_at_a_time() -> None:
    ring = Joined()
    first = ring.parts()
    await anext(first)
    with pytest.raises(ServiceError) as caught:
        await anext(ring.parts())
    assert caught.value.reason == "OPERATION_RUNNING" and caught.value.retry_after_s > 0
    await first.aclose()
    await settle()
    again = ring.parts()
    assert isinstance(await anext(again), Recording)
    await again.aclose()


async def test_losses_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = Joined()
    parts = ring.parts()
    await anext(parts)
    waiting = asyncio.create_task(anext(parts))
    await settle()
    ring.gateway.lost({"tokenizer-0"})  # another one
    await settle()
    assert not waiting.done()
    ring.gateway.lost({"engine-0"})
    with pytest.raises(ServiceError) as caught:
        await waiting
    assert caught.value.reason == "STAGE_LOST"
    monkeypatch.setattr(remote, "PATIENCE_S", 0.0)
    ring.loses = True
    with pytest.raises(ServiceError) as caught:
        await anext(ring.parts(takes_s=0.01))
    assert caught.value.reason == "STAGE_LOST"


async def test_a_process_that_has_started_again_does_not_go_on_and_a_gap_is_seen() -> None:
    ring = Joined()
    ring.goes_on.set()
    parts = ring.parts()
    await anext(parts)
    await ring.process.close()
    with pytest.raises(ServiceError) as caught:
        await anext(parts)
    assert caught.value.reason == "NOT_OPEN"
    parts = ring.parts()
    await anext(parts)
    call = ring.answered[-1].call
    ring.gateway.handle(OperationAnswer("gateway-0", EPOCH, call, "engine-0", 5, Chunk(b"")))
    with pytest.raises(ServiceError) as caught:
        await anext(parts)
    assert caught.value.reason == "STAGE_LOST"


async def test_only_answers_of_this_boot_and_process_count() -> None:
    ring = Joined()
    parts = ring.parts()
    await anext(parts)
    waiting = asyncio.create_task(anext(parts))
    await settle()
    call, refused = ring.answered[-1].call, Refused.of(invalid("a", "b"))
    for answer in (
        OperationAnswer("gateway-0", EPOCH - 1, call, "engine-0", 1, refused),
        OperationAnswer("gateway-0", EPOCH, call, "engine-1", 1, refused),
        OperationAnswer("gateway-0", EPOCH, call + 1, "engine-0", 1, refused),
    ):
        ring.gateway.handle(answer)
    await settle()
    assert not waiting.done()
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting


async def test_processes_that_are_not_there_are_named() -> None:
    ring = Joined()
    with pytest.raises(ServiceError) as caught:
        await anext(ring.parts("engine-9"))
    assert caught.value.reason == "PROCESS_NOT_FOUND" and "engine-0" in caught.value.message
    ring.process._kinds.clear()
    with pytest.raises(ServiceError) as caught:
        await anext(ring.parts())
    assert caught.value.field == "process"


async def test_operations_of_an_engine_that_leaves_fail_and_one_that_joined_can_be_asked() -> None:
    joined = Joined()
    parts = joined.parts()
    assert await anext(parts) == Recording()
    joined.gateway.change_engines({"engine-0"}, {"engine-1"})
    with pytest.raises(ServiceError, match="engine-0"):
        await anext(parts)
    joined.gateway.check("engine-1")
    with pytest.raises(ServiceError, match="this service has engine-1, gateway-0"):
        joined.gateway.check("engine-0")
    joined.goes_on.set()
