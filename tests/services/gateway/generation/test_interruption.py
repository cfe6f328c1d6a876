"""A reading task is ended by one of our errors; a cancellation from elsewhere stays a cancellation."""

import asyncio

import pytest

from sluice_server.engine.errors import ServiceError, cancelled, stage_lost
from sluice_server.services.gateway.generation.interruption import Interruption


async def waiting(interruption: Interruption, begun: asyncio.Event) -> None:
    with interruption.scope():
        begun.set()
        await asyncio.Event().wait()


async def begun(interruption: Interruption) -> "asyncio.Task[None]":
    has_begun = asyncio.Event()
    task = asyncio.create_task(waiting(interruption, has_begun))
    await has_begun.wait()
    return task


async def test_a_block_that_waits_ends_in_the_first_error() -> None:
    interruption, first = Interruption(), stage_lost("engine")
    task = await begun(interruption)
    interruption.interrupt(first)
    interruption.interrupt(cancelled())
    with pytest.raises(ServiceError) as caught:
        await task
    assert caught.value is first and not task.cancelling()


async def test_a_cancellation_from_elsewhere_is_raised_on() -> None:
    interruption = Interruption()
    task = await begun(interruption)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    task = await begun(interruption)
    interruption.interrupt(stage_lost("engine"))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_no_task_is_interrupted_outside_the_block() -> None:
    interruption = Interruption()
    with interruption.scope():
        pass
    interruption.interrupt(stage_lost("engine"))
    await asyncio.sleep(0)
    with pytest.raises(ServiceError):
        interruption.check()
