"""Rows that share a prefix: looked for again where their blocks change, and computed with the same bits on a CPU."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sluice_server.engine.kv_cache.table import BlockRun
from sluice_server.engine.plan import Placement, StepPlan
from sluice_server.engine.request import SamplingParams
from sluice_server.engine.worker import forward
from sluice_server.engine.worker.prefixes import SharedPrefixes
from sluice_server.kernels.layout.prefixes import PrefixGroups
from tests.engine.test_engine_oracle import ROOMY, make_engine
from tests.engine.test_engine_search import run
from tests.oracle.checkpoints import Shape, make_checkpoint

BLOCK = 4
# Two rows of one token, and one of a prompt.
PLAN = StepPlan(
    step=1,
    slots=[0, 1, 2],
    query_lens=[1, 1, 2],
    starts=[9, 9, 0],
    token_ids=[5, 5, 5, 5],
    samples=[True] * 3,
    placements=[],
    new_blocks=[],
)


@pytest.mark.parametrize(
    ("change", "is_new"),
    [
        pytest.param({}, False, id="nothing"),
        pytest.param({"new_blocks": [BlockRun(1, 3, [7])]}, False, id="a block behind the tokens"),
        pytest.param({"new_blocks": [BlockRun(1, 1, [7])]}, True, id="a block of tokens, as of another beam"),
        pytest.param({"new_blocks": [BlockRun(5, 3, [7])]}, True, id="a slot that computes nothing"),
        pytest.param({"slots": [1, 0, 2]}, True, id="other rows"),
        pytest.param({"placements": [Placement(0, SamplingParams(), (), 0)]}, True, id="another sequence"),
    ],
)
def test_prefixes_are_looked_for_where_blocks_change(change: dict[str, Any], is_new: bool) -> None:
    tables = np.array([[1, 2, 3, 0], [1, 2, 4, 0], [5, 0, 0, 0]], dtype=np.int32)
    prefixes = SharedPrefixes(tables, BLOCK, least_saved=1)
    first = prefixes.of(PLAN)
    assert first == PrefixGroups([0, 1], [2], [8])
    tables[1, 1] = 9
    assert (prefixes.of(dataclasses.replace(PLAN, **change)) is not first) is is_new


def test_tokens_do_not_depend_on_prefixes_that_rows_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and in beams, which go on from one another, beside a prompt that shares nothing."""
    path = make_checkpoint(tmp_path, Shape(kv_heads=2))
    start = [(7 * i) % 90 + 3 for i in range(40)]
    prompts = {str(i): [*start, *range(3, 4 + i)] for i in range(5)} | {"other": [9, 8, 7]}
    found: list[PrefixGroups | None] = []
    of = SharedPrefixes.of

    def seen(self: SharedPrefixes, plan: StepPlan) -> PrefixGroups | None:
        found.append(of(self, plan))
        return found[-1]

    monkeypatch.setattr(SharedPrefixes, "of", seen)
    for beams in (0, 3):
        outputs = []
        for least in (10**9, 1):
            monkeypatch.setattr(forward, "LEAST_SAVED_ON_CPU", least)
            engine = make_engine(path, ROOMY)
            run(engine, {"first": start}, temperature=0.0)  # leaves its blocks behind
            found.clear()
            outputs.append(run(engine, prompts, beam_width=beams, n=max(1, beams), temperature=0.0))
            assert any(found) is (least == 1)
        assert outputs[0] == outputs[1]
