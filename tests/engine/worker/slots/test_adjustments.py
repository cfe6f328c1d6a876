"""The logit adjustments of slots: a reused slot has nothing of its earlier request, and counts follow the tokens."""

import random

from sluice_server.engine.plan import Placement
from sluice_server.engine.request import SamplingParams
from sluice_server.engine.sampling.history import TokenHistories
from sluice_server.engine.sampling.rows import PenaltyRows
from sluice_server.engine.worker.slots.adjustments import SlotAdjustments

PENALISED = SamplingParams(presence_penalty=0.5, repetition_penalty=1.5)
BIASED = SamplingParams(logit_bias=((3, 1.0), (4, -1.0)), allowed_token_ids=(3, 4))


def placement(slot: int, params: SamplingParams, tokens: tuple[int, ...] = (), num_prompt: int = 0) -> Placement:
    return Placement(slot, params, (), 0, tokens=tokens, num_prompt=num_prompt)


def test_history_counts_as_the_tokens_do() -> None:
    rng = random.Random(1)
    tokens = [rng.randrange(200) for _ in range(500)]
    table = TokenHistories()
    whole, piecewise = table.open(tokens, 100), table.open(tokens[:130], 100)
    at = 130
    while at < len(tokens):
        num = rng.randrange(1, 9)
        piecewise.append(tokens[at : at + num])
        at += num
    for history in (whole, piecewise):
        found = dict(zip(history.ids.tolist(), history.counts.tolist(), strict=True))
        assert found == {token: tokens[100:].count(token) for token in set(tokens)}
    assert whole.num_tokens == piecewise.num_tokens == 500


def entries(found: PenaltyRows | None, at: int) -> dict[int, float]:
    assert found is not None
    span = slice(found.firsts[at], found.firsts[at] + found.sizes[at])
    return dict(zip(found.ids[span].tolist(), found.counts[span].tolist(), strict=True))


def test_histories_move_and_stay_what_they_are() -> None:
    """Slots are taken, grow at different rates, and are freed: some beyond their row, some beyond all rows."""
    rng, slots, counts = random.Random(2), SlotAdjustments(5000), dict[int, dict[int, float]]()
    ends: dict[int, int] = {}
    for step in range(1500):
        slot = rng.randrange(6)
        if slot not in counts or not rng.randrange(60):
            prompt = tuple(rng.randrange(5000) for _ in range(rng.randrange(1, 150)))
            slots.reset(placement(slot, PENALISED, prompt, len(prompt)))
            counts[slot], ends[slot] = dict.fromkeys(prompt, 0.0), len(prompt)
        tokens = [rng.randrange(5000) for _ in range(rng.randrange(1, 5))]
        ends[slot] += len(tokens)
        slots.note(slot, ends[slot], tokens)
        for token in tokens:
            counts[slot][token] = counts[slot].get(token, 0.0) + 1
        order = sorted(counts, key=lambda _: rng.random()) if step % 3 else sorted(counts)
        found = slots.penalties(order, {})
        assert [entries(found, at) for at in range(len(order))] == [counts[one] for one in order]


def test_rows_behind_drafts_have_them_too() -> None:
    slots = SlotAdjustments(40)
    slots.reset(placement(0, PENALISED, (7, 8), 2))
    slots.reset(placement(1, PENALISED, (7, 8), 2))
    found = slots.penalties([0, 1, 1], {2: [8, 9, 9]})
    assert [entries(found, at) for at in range(3)] == [{7: 0, 8: 0}, {7: 0, 8: 0}, {7: 0, 8: 1, 9: 2}]
    assert entries(slots.penalties([1], {}), 0) == {7: 0, 8: 0}


def test_new_tokens_are_noted_once() -> None:
    slots = SlotAdjustments(40)
    slots.reset(placement(1, PENALISED, (7, 8, 9), 2))
    slots.note(1, 3, [8, 9])  # the end of a prefill: nothing is new
    slots.note(1, 4, [5])
    slots.note(1, 4, [5])  # the same step once more, as after a failed one
    slots.note(1, 5, [9])
    found = slots.penalties([0, 1], {})
    assert found is not None and set(found.rows.tolist()) == {1}
    assert entries(found, 0) == {7: 0.0, 8: 0.0, 9: 2.0, 5: 1.0}
    assert set(found.presence.tolist()) == {0.5} and set(found.repetition.tolist()) == {1.5}


def test_rows_follow_the_order_of_the_slots() -> None:
    slots = SlotAdjustments(40)
    slots.reset(placement(0, BIASED))
    slots.reset(placement(2, PENALISED, (1,), 1))
    biases, penalties = slots.biases([2, 0]), slots.penalties([2, 0], {})
    assert biases is not None and penalties is not None
    assert (biases.rows.tolist(), biases.ids.tolist(), biases.values.tolist()) == ([1, 1], [3, 4], [1.0, -1.0])
    assert penalties.rows.tolist() == [0]
    allowed = slots.allowed([2, 0])
    assert allowed is not None and (allowed.rows.tolist(), allowed.bits.tolist()) == ([1], [[0b11000, 0]])


def test_a_reused_slot_has_no_old_state() -> None:
    slots = SlotAdjustments(40)
    for params in (PENALISED, BIASED, SamplingParams()):
        slots.reset(placement(0, params, (1, 2), 1))
    assert slots.penalties([0], {}) is None and slots.biases([0]) is None and slots.allowed([0]) is None
    assert not slots.listens(0)
