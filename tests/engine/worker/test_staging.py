"""Which tokens are staged for the device, and what it is known to have written itself."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from sluice_server.engine.plan import IN_FLIGHT, Placement, StepPlan
from sluice_server.engine.request import SamplingParams
from sluice_server.engine.worker.followers import NoFollowers
from sluice_server.engine.worker.slots.state import DeviceState, Slots
from sluice_server.engine.worker.staging import StagedTokens
from sluice_server.engine.worker.step_numbers import UniformRows
from tests.engine.worker.host_device import HostDevice


class Heard(NoFollowers):
    """Collects what other ranks are told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int, list[int]]] = []

    def note(self, slot: int, first: int, ids: Sequence[int]) -> None:
        self.told.append((slot, first, list(ids)))


class Stage:
    """Four slots, of which the last wants more than sampling."""

    def __init__(self) -> None:
        self.heard = Heard()
        self.state = DeviceState(HostDevice(), torch.device("cpu"), Slots(4, 12, 4))
        self.tokens = StagedTokens(self.state, self.heard)
        for slot in range(4):
            params = SamplingParams(logprobs=0) if slot == 3 else SamplingParams()
            self.tokens.place(Placement(slot, params, (), 0))

    def stage(
        self, rows: list[tuple[int, int, list[int]]], *, is_sampled: bool = True, samples: list[bool] | None = None
    ) -> list[tuple[int, int, list[int]]]:
        """Stages rows of (slot, start, ids); returns what was told of them."""
        slots, starts, ids = zip(*rows, strict=True)
        lens = [len(one) for one in ids]
        flat = [token for one in ids for token in one]
        plan = StepPlan(1, list(slots), lens, list(starts), flat, samples or [True] * len(rows), [], [])
        in_arrays = UniformRows(np.array(slots), np.array(starts), np.array(lens), samples=samples)
        self.heard.told.clear()
        self.tokens.stage(plan, in_arrays, is_sampled=is_sampled)
        return list(self.heard.told)


def test_what_the_device_samples_is_not_staged() -> None:
    stage = Stage()
    assert stage.stage([(0, 3, [7]), (2, 5, [8])]) == [(0, 3, [7]), (2, 5, [8])]
    assert stage.state.tokens[0, 3] == 7 and stage.state.tokens[2, 5] == 8
    assert stage.stage([(0, 4, [IN_FLIGHT]), (2, 6, [IN_FLIGHT])]) == []
    assert stage.stage([(0, 5, [IN_FLIGHT]), (2, 8, [9])]) == [(2, 8, [9])]  # a token passed over is not there


def test_what_the_host_samples_is_staged() -> None:
    stage = Stage()
    stage.stage([(0, 3, [7])], is_sampled=False)
    assert stage.stage([(0, 4, [1])]) == [(0, 4, [1])]


def test_behind_drafts_nothing_is_known() -> None:
    stage = Stage()
    stage.stage([(0, 3, [7, 8, 9]), (1, 3, [7])])
    assert stage.stage([(0, 4, [8]), (1, 4, [IN_FLIGHT])]) == [(0, 4, [8])]
    assert stage.stage([(0, 5, [1, 2, 3])]) == [(0, 5, [1, 2, 3])]  # the first of them is there, drafts are not
    assert stage.stage([(0, 8, [4])]) == [(0, 8, [4])]


def test_of_a_prompt_all_is_staged_and_the_token_behind_it_is_there() -> None:
    stage = Stage()
    rows: list[tuple[int, int, list[int]]] = [(0, 3, [5]), (1, 0, [6, 7]), (2, 0, [8, 9])]
    assert stage.stage(rows, samples=[True, False, True]) == rows
    after: list[tuple[int, int, list[int]]] = [(0, 4, [IN_FLIGHT]), (1, 2, [4]), (2, 2, [IN_FLIGHT])]
    assert stage.stage(after) == [(1, 2, [4])]


def test_a_new_sequence_has_nothing_of_the_one_before() -> None:
    stage = Stage()
    stage.stage([(0, 3, [7])])
    stage.tokens.place(Placement(0, SamplingParams(), (), 0))
    assert stage.stage([(0, 4, [2])]) == [(0, 4, [2])]


def test_a_token_that_is_on_no_device_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="slot 1: the token at 4 is on no device"):
        Stage().stage([(1, 4, [IN_FLIGHT])])


@pytest.mark.parametrize(("slots", "expected"), [([0, 2], True), ([0, 3], False)])
def test_slots_that_want_more_than_sampling_are_known(slots: list[int], expected: bool) -> None:
    found: Any = Stage().tokens.are_plain(np.array(slots))
    assert found is expected
