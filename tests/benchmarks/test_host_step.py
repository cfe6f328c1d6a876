"""The benchmark of host time: every row decodes, parts are all of it, and nothing stays patched."""

from collections import Counter

from benchmarks import host_step


def test_every_row_decodes_in_steps_that_are_recorded() -> None:
    engine = host_step.steady(3, 8)
    for _ in range(4):
        events = engine.step()
        assert len(events.sampled) == 3 and {one.token_ids for one in events.sampled} == {(host_step.WORD,)}


def test_parts_are_counted_and_methods_are_put_back() -> None:
    before = [owner.__dict__[name] for _, owner, name in host_step.PARTS]
    engine, spent = host_step.steady(2, 8), Counter[str]()
    with host_step.watched(spent):
        engine.step()
    assert set(spent) == {part for part, _, _ in host_step.PARTS}
    assert [owner.__dict__[name] for _, owner, name in host_step.PARTS] == before


def test_a_row_is_a_share_of_the_step() -> None:
    found = host_step.host_step(2, 3)
    assert abs(found["us_a_row"] - found["us_a_step"] / 2) < 0.02 and found["plan"] > 0
