"""A slot's sampling parameters on both paths of a runner: the host's arrays and the device's rows."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sluice_server.engine.parameter_kinds import LEAST
from sluice_server.engine.plan import Placement
from sluice_server.engine.request import ProcessorCall, SamplingParams
from sluice_server.engine.sampling.fixed import FixedRows
from sluice_server.engine.sampling.grammars import Grammars
from sluice_server.engine.sampling.matchers import SlotMatchers
from sluice_server.engine.sampling.rows import SamplingRows
from sluice_server.engine.worker.slots.rows import SlotRows
from sluice_server.engine.worker.slots.state import DeviceState, Slots
from sluice_server.kernels.reference.sampling import Rows
from tests.engine.worker.host_device import HostDevice

CPU = torch.device("cpu")
NUM, VOCAB, LENGTH, BLOCK = 6, 50, 32, 8
PARAMS = {
    4: SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.01, typical_p=0.8, seed=9),
    1: SamplingParams(temperature=0.0),
    0: SamplingParams(temperature=1e-60, top_p=1e-60, typical_p=1e-60),
    3: SamplingParams(seed=(1 << 64) - 5),
}


def place(params: dict[int, SamplingParams]) -> tuple[SlotRows, DeviceState]:
    """Places requests in these slots on both paths."""
    host = SlotRows(NUM, LENGTH // BLOCK, VOCAB, SlotMatchers(Grammars(None), VOCAB, ()))
    device = DeviceState(HostDevice(), CPU, Slots(NUM, LENGTH, BLOCK))
    for slot, asked in params.items():
        placement = Placement(slot=slot, params=asked, banned_ids=(), min_position=0, output_index=slot)
        host.reset(placement)
        device.place(placement)
    device.flush()
    return host, device


def both(host: SlotRows, device: DeviceState, slots: list[int]) -> tuple[Rows, Rows]:
    """The sampling parameters of these slots' rows on both paths."""
    positions = list(range(7, 7 + len(slots)))
    sampled = host.sampling_rows(slots, positions)
    fixed = FixedRows(sampled.param_rows, VOCAB, CPU).rows(sampled.position)
    return fixed, device.rows(torch.tensor(slots), torch.tensor(positions))


def assert_same(found: Rows, wanted: Rows) -> None:
    for name, one, other in zip(Rows._fields, found, wanted, strict=True):
        assert isinstance(one, Tensor) and one.dtype is other.dtype and torch.equal(one, other), name


def test_host_and_device_sample_a_slot_by_the_same_numbers() -> None:
    on_host, on_device = both(*place(PARAMS), [3, 0, 4, 1])
    assert_same(on_device, on_host)
    assert on_host.seeds.tolist() == [-5, 0, 9, 0] and on_host.outputs.tolist() == [3, 0, 4, 1]
    assert on_host.temperature.tolist() == np.array([1.0, LEAST, 0.7, 0.0], dtype=np.float32).tolist()


def test_free_slots_are_neutral() -> None:
    on_host, on_device = both(*place({}), [0, NUM - 1])
    assert_same(on_device, on_host)
    assert on_host.top_k.tolist() == [0, 0] and on_host.top_p.tolist() == [1.0, 1.0]


def test_the_next_request_of_a_slot_has_nothing_of_the_last_one() -> None:
    host, device = place(PARAMS)
    plain = Placement(slot=4, params=dataclasses.replace(PARAMS[1], seed=3), banned_ids=(), min_position=0)
    host.reset(plain)
    device.place(plain)
    device.flush()
    fresh = place({4: plain.params})
    assert_same(both(host, device, [4])[0], both(*fresh, [4])[0]._replace(outputs=torch.tensor([0])))
    assert_same(both(host, device, [4])[1], both(host, device, [4])[0])


def next_rows(first: SamplingParams, then: SamplingParams) -> tuple[SamplingRows, SamplingRows]:
    """The rows that one slot samples with, for a sequence and for the one after it."""
    host, found = place({})[0], []
    for params in (first, then):
        host.reset(Placement(slot=2, params=params, banned_ids=(), min_position=0))
        found.append(host.sampling_rows([2], [5]))
    return found[0], found[1]


def test_a_request_with_the_parameters_of_the_last_one_is_sampled_with_its_rows() -> None:
    """A greedy output draws nothing: gateways give each a seed of its own."""
    asked = dataclasses.replace(PARAMS[4], logit_bias=((3, 1.5),), logprobs=2)
    for first, then in [
        (asked, dataclasses.replace(asked, max_tokens=7)),
        (SamplingParams(temperature=0.0, seed=1), SamplingParams(temperature=0.0, seed=2)),
    ]:
        one, other = next_rows(first, then)
        assert one.param_rows is other.param_rows


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0.25},
        {"top_k": 4},
        {"top_p": 0.5},
        {"min_p": 0.02},
        {"typical_p": 0.7},
        {"seed": 10},
        {"logprobs": 1},
        {"logprob_token_ids": (4, 5)},
        {"logit_bias": ((3, 1.0),)},
        {"allowed_token_ids": (1, 2)},
    ],
)
def test_a_request_with_another_parameter_is_sampled_with_rows_of_its_own(change: dict[str, Any]) -> None:
    """They are those that it has in a slot without a former sequence."""
    then = dataclasses.replace(PARAMS[4], **change)
    found, alone = next_rows(PARAMS[4], then)[1].param_rows, next_rows(then, then)[0].param_rows
    for field in dataclasses.fields(found):
        one, other = getattr(found, field.name), getattr(alone, field.name)
        assert_equal_parts(one, other)


def test_a_greedy_request_with_a_strategy_that_draws_has_its_own_seed() -> None:
    one, other = (SamplingParams(temperature=0.0, seed=seed, strategy=ProcessorCall("random", ())) for seed in (1, 2))
    found = next_rows(one, other)
    assert [rows.param_rows.seed.tolist() for rows in found] == [[1], [2]]
    assert next_rows(dataclasses.replace(one, strategy=None), other)[1].param_rows.seed.tolist() == [2]


def assert_equal_parts(one: object, other: object) -> None:
    """Compares arrays, and dataclasses of arrays."""
    if dataclasses.is_dataclass(one):
        for field in dataclasses.fields(one):
            assert_equal_parts(getattr(one, field.name), getattr(other, field.name))
    else:
        np.testing.assert_array_equal(one, other)
