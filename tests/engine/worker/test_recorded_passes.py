"""Recorded passes of drafters: the drafts that computed passes give, of models and of heads, in every size of rows."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from sluice_server.engine.engine import Engine
from sluice_server.engine.speculation.draft import DraftProposer
from sluice_server.engine.speculation.draft_passes import ComputedPasses, DraftPass, EndStates
from sluice_server.engine.speculation.drafters import HeadDrafter
from sluice_server.engine.worker.recorded_passes import PassSizes, RecordedPasses, recorded_pass_bytes
from sluice_server.kernels import gpu
from tests.engine.speculation.test_verification import run
from tests.engine.worker.host_device import HostDevice, reference_family
from tests.engine.worker.test_overlap_forms import BRANCHING, PARAMS, PROMPTS, SHAPE, make
from tests.oracle.checkpoints import make_checkpoint
from tests.oracle.heads import make_head

ROWS = 3  # fewer than the engine has, so that some passes are not recorded
MOST_READ = 512
LONGER = {**PARAMS, "max_tokens": 20}
SPECULATION = pytest.mark.parametrize("speculation", ["draft", "eagle"])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_checkpoint(tmp_path_factory.mktemp("llama"), SHAPE)
    (made / "head").mkdir()
    make_head(made / "head", SHAPE)
    return made


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "takes", lambda _: True)
    monkeypatch.setattr(gpu, "family", reference_family)


def drafting(checkpoint: Path, speculation: str) -> tuple[Engine, ComputedPasses]:
    """An engine that drafts, and what computes its passes."""
    engine = make(checkpoint, dataclasses.replace(BRANCHING, speculation=speculation), None)
    assert isinstance(engine.proposer, DraftProposer)
    passes = engine.proposer._passes
    assert isinstance(passes, ComputedPasses)
    return engine, passes


def recorded(passes: ComputedPasses, rows: int, device: HostDevice) -> RecordedPasses:
    """The same passes, recorded."""
    own = passes.drafter, passes._cache, passes.block_size
    made = RecordedPasses(*own, PassSizes(rows, SHAPE.context, BRANCHING.max_draft_tokens), device)
    made.warm()
    return made


def watched(passes: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[DraftPass, Any]]:  # noqa: ANN401 # of either kind
    """Every pass, and copies of what it returns."""
    seen: list[tuple[DraftPass, Any]] = []
    compute = passes.compute

    def watching(one: DraftPass) -> EndStates | None:
        found: EndStates | None = compute(one)
        kept = None if found is None else (found.hidden.clone(), found.logits.clone())
        seen.append((dataclasses.replace(one, states=None), kept))
        return found

    monkeypatch.setattr(passes, "compute", watching)
    return seen


@SPECULATION
@pytest.mark.parametrize("rows", [BRANCHING.max_num_seqs, ROWS])
def test_recorded_passes_give_the_drafts_of_computed_ones(
    checkpoint: Path, speculation: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, passes = drafting(checkpoint, speculation)
    want = watched(passes, monkeypatch)
    tokens = run(engine, PROMPTS, **LONGER)
    assert engine.scheduler.draft_stats.num_drafted > 0

    again, passes = drafting(checkpoint, speculation)
    device = HostDevice()
    replayed = recorded(passes, rows, device)
    again.proposer = DraftProposer(replayed, MOST_READ)
    captures, found = device.log.count("capture"), watched(replayed, monkeypatch)
    computed = watched(replayed._computed, monkeypatch)
    assert run(again, PROMPTS, **LONGER) == tokens
    replays = device.log.count("replay")
    assert device.log.count("capture") == captures and replays == len(found) - len(computed)
    assert replays > 4 if rows > ROWS else computed
    for (one, ours), (other, theirs) in zip(found, want, strict=True):
        assert (one.ids, one.nums, one.contexts, one.ends) == (other.ids, other.nums, other.contexts, other.ends)
        assert (ours is None) is (theirs is None)
        if ours is not None:
            assert all((a - b).abs().max() < 1e-4 for a, b in zip(ours, theirs, strict=True))


@SPECULATION
def test_what_they_take_is_measured_before_the_cache_exists(checkpoint: Path, speculation: str) -> None:
    """A head's target goes on writing where it did."""
    _, passes = drafting(checkpoint, speculation)
    drafter, device, sizes = passes.drafter, HostDevice(), PassSizes(2, SHAPE.context, 3)
    hooks = dict(drafter._target.hidden_state_hooks) if isinstance(drafter, HeadDrafter) else {}
    found = recorded_pass_bytes(drafter, passes._cache[0].dtype, 4, sizes, device)
    assert found == 2 * (SHAPE.vocab + SHAPE.context // 4) * 4 and "capture" in device.log
    assert not isinstance(drafter, HeadDrafter) or drafter._target.hidden_state_hooks == hooks
