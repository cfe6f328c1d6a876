"""What is left of a GPU's memory for the cache."""

import pytest

from engine.errors import ServiceError
from engine.runner.memory import room

GIB = 1 << 30


def test_the_cache_gets_what_weights_steps_and_others_leave() -> None:
    assert room(80 * GIB, 80 * GIB, 20 * GIB, 0.9) == 52 * GIB
    assert room(80 * GIB, 70 * GIB, 20 * GIB, 0.9) == 42 * GIB


@pytest.mark.parametrize(("available", "peak"), [(80, 72), (20, 15)])
def test_no_room_names_the_knob(available: int, peak: int) -> None:
    with pytest.raises(ServiceError, match=r"--gpu-memory-utilization: 0\.9 of 81920 MiB"):
        room(80 * GIB, available * GIB, peak * GIB, 0.9)
