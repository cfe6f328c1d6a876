"""Adapter slots in a device's memory: copies that no step waits for, and gaps that are closed."""

import pytest
import torch

from sluice_server.engine.adapters.device_slots import DeviceSlots
from sluice_server.engine.adapters.images import AdapterImage
from sluice_server.engine.models.layers.device_sides import DeviceTables
from sluice_server.engine.models.layers.sides import LINEARS
from sluice_server.engine.worker import device as devices
from sluice_server.kernels.reference.low_rank import MAX_PARTS, PLACES
from tests.pretended_gpu.cuda import pretend
from tests.pretended_gpu.memory import CUDA

LAYERS = 2


def some_image(size: int, number: float) -> AdapterImage:
    """An image of one number, whose matrices begin in its middle."""
    memory = devices.pinned(size, torch.float32)
    memory.fill_(number)
    places = torch.full((LAYERS, len(LINEARS), PLACES), size // 2)
    return AdapterImage(memory, places, torch.full((LAYERS, len(LINEARS), MAX_PARTS), number))


def made(size: int, num_slots: int = 4) -> DeviceSlots:
    tables = DeviceTables(torch.zeros(size, device=CUDA), num_slots, [[()] * len(LINEARS)] * LAYERS)
    return DeviceSlots(tables, devices.CudaDevice(CUDA), devices.CudaCopies(CUDA))


def check(slots: DeviceSlots, slot: int, number: float, size: int) -> None:
    """The matrices of a slot are where its table says."""
    tables = slots.tables
    for column in (0, 4, 7, 10):
        [first] = {*tables.places[slot, ..., column].flatten().tolist()}
        assert {*tables.memory[first - size // 2 : first + size - size // 2].tolist()} == {number}
    assert {*tables.places[slot, ..., 3].flatten().tolist()} == {size // 2}, "no number but places is changed"
    assert {*tables.scales[slot].flatten().tolist()} == {number}


def test_a_slot_is_full_when_its_copy_has_arrived_and_nothing_waits_for_that() -> None:
    with pretend():
        slots, full = made(300), list[int]()
        torch.cuda.set_sync_debug_mode("error")
        for slot in (0, 1):
            slots.fill(slot, some_image(100, 1.0 + slot), lambda slot=slot: full.append(slot))  # type: ignore[misc]
        assert slots.is_busy and not full
        slots.settle()
        assert slots.is_busy and not full  # an event has not happened when it is asked first
        slots.settle()
        torch.cuda.set_sync_debug_mode("default")
        assert full == [0, 1] and not slots.is_busy
        for slot in (0, 1):
            check(slots, slot, 1.0 + slot, 100)


def test_gaps_are_closed_once_copies_under_way_have_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """What moves overlaps itself, in several pieces, and its table follows."""
    monkeypatch.setattr("sluice_server.engine.adapters.device_slots.MOVED_AT_ONCE", 7)
    with pretend():
        slots, full = made(300), list[int]()

        def fill(slot: int, size: int) -> None:
            slots.fill(slot, some_image(size, 1.0 + slot), lambda: full.append(slot))

        for slot, size in enumerate((40, 100, 60)):
            fill(slot, size)
        for _ in range(2):
            slots.settle()
        slots.empty(0)
        fill(3, 130)  # 40 in front and 100 behind are left
        assert full == [0, 1, 2]
        check(slots, 1, 2.0, 100)
        for _ in range(2):
            slots.settle()
        assert full == [0, 1, 2, 3]
        for slot, size in ((1, 100), (2, 60), (3, 130)):
            check(slots, slot, 1.0 + slot, size)
        slots.empty(2)
        fill(0, 20)
        fill(2, 50)  # waits, as what is copied must not move
        assert slots.tables.places[3, 0, 0, 0].item() == 160 + 65, "nothing moves yet"
        for _ in range(4):
            slots.settle()
        assert full == [0, 1, 2, 3, 0, 2] and not slots.is_busy
        for slot, size in ((0, 20), (1, 100), (2, 50), (3, 130)):
            check(slots, slot, 1.0 + slot, size)
