"""The layers of ranks as one call with its sums, compared with a call of Python for each sum: no bit may differ."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.layers import runs
from sluice_server.engine.models.layers.sides import HostSides
from sluice_server.engine.models.model import Model
from sluice_server.engine.parallel.sums import LocalSums, RankSums, SumsBroken
from sluice_server.engine.parallel.sums_shared import SharedMemorySums, new_segment
from sluice_server.kernels.cpu import builds, native_layers
from sluice_server.kernels.layout.metadata import AttentionMetadata
from tests.engine.parallel.rank_threads import MemorySums, memory_sums, run_ranks
from tests.engine.parallel.test_rank_formats import load
from tests.engine.parallel.test_rank_models import BLOCK, CPU, CUTS, FORMATS, SHAPES, served
from tests.kernels.cpu.native import kernels_of
from tests.oracle.checkpoints import make_checkpoint

# Every sum is part of a call, and Python computes what is between to the same bits: it norms heads and what joins the
# residual stream in another way.
ALIKE = ("llama-biases", "phi3", "granite")
pytestmark = pytest.mark.skipif(not builds.is_available(), reason="installed without a C++ compiler")


class Calls:
    """How many layers each call computed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        call = native_layers.shared_layers

        def note(sums: Sequence[float], table: Tensor, *rest: object) -> tuple[int, int, int, float]:
            self.sizes.append(len(table))
            return call(sums, table, *rest)  # type: ignore[arg-type] # whatever it takes

        monkeypatch.setattr(native_layers, "shared_layers", note)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", ALIKE)
@pytest.mark.parametrize(("size", "shards"), [(2, 2), (2, 4), (4, 4)])
def test_bits_are_those_of_a_call_for_each_sum(name: str, form: str, size: int, shards: int, tmp_path: Path) -> None:
    own = served(tmp_path, (name, False), *FORMATS[form])
    assert torch.equal(own.over(size, shards), own.by_calls(size, shards))


@pytest.mark.parametrize("name", builds.KNOWN)
def test_every_instruction_set(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = kernels_of(name)
    monkeypatch.setattr(builds, "MODULE", module)
    own = served(tmp_path, ("llama-biases", False), *FORMATS["int8"])
    assert torch.equal(own.over(2, 2), own.by_calls(2, 2))


@pytest.mark.parametrize("name", ["llama-biases", "qwen3", "gemma2"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_step_is_one_call_on_every_rank(
    name: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, calls = served(tmp_path, (name, False)), Calls(monkeypatch)
    own.over(size, 2)
    assert calls.sizes == [own.config.num_layers] * size * len(CUTS)


def test_layers_with_experts_and_without_norms_before_are_computed_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(monkeypatch)
    for name in ("qwen3-experts", "olmo2", "gpt-oss"):
        served(tmp_path / name, (name, False)).over(1, 2)
    assert not calls.sizes


def test_sums_of_several_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In slots that hold less than a step's partial sums."""
    own = served(tmp_path, ("llama-biases", False))
    wanted, calls = own.by_calls(2, 4), Calls(monkeypatch)
    for floats in (1 << 9, 37):
        file = new_segment(2, floats)
        each = [SharedMemorySums(file, rank, 4, 60.0) for rank in range(2)]
        assert torch.equal(run_ranks(each, own.logits)[0], wanted)
    assert calls.sizes


def test_a_call_has_no_more_work_than_may_go_on_unattended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = served(tmp_path, ("llama-biases", False))
    wanted, calls = own.over(2, 4), Calls(monkeypatch)
    monkeypatch.setattr(runs, "MOST_WORK", 0)
    assert torch.equal(own.over(2, 4), wanted)
    assert set(calls.sizes) == {1}


def test_without_the_kernels_for_it_each_sum_is_a_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with kernels that were built before these sources."""
    own = served(tmp_path, ("llama-biases", False))
    wanted, calls = own.over(2, 4), Calls(monkeypatch)
    monkeypatch.setattr(native_layers, "has_shared_layers", lambda: False)
    assert torch.equal(own.over(2, 4), wanted) and not calls.sizes


def one_step(model: Model, sides: HostSides | None = None) -> Tensor:
    meta = AttentionMetadata.build([5], [5], torch.arange(4, dtype=torch.int32)[None].numpy(), BLOCK, CPU)
    kept = torch.tensor([1, 4])
    return model.forward(torch.arange(5) + 3, meta.positions, model.new_cache(4, BLOCK), meta, kept, sides=sides)


def test_ranks_may_go_different_ways_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank whose adapters failed computes on without them, as the others wait for it; wanted rows are the same."""
    make_checkpoint(tmp_path, SHAPES["llama-biases"])
    wanted, calls = one_step(load(tmp_path, LocalSums(2))), Calls(monkeypatch)

    def logits(sums: RankSums) -> Tensor:
        return one_step(load(tmp_path, sums), HostSides([]) if sums.rank else None)

    assert all(torch.equal(found, wanted) for found in run_ranks(memory_sums(2), logits))
    assert calls.sizes == [read_config(tmp_path).num_layers]


def test_what_sums_of_a_call_take_is_counted(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, SHAPES["llama-biases"])
    counted: list[float] = []

    class Counting(MemorySums):
        def follow(self, ended: tuple[int, int, int, float]) -> None:
            before = self.seconds
            super().follow(ended)
            counted.append(self.seconds - before)
            assert abs(counted[-1] - ended[-1]) < 1e-6

    file = new_segment(2)
    run_ranks([Counting(file, rank) for rank in range(2)], lambda sums: one_step(load(tmp_path, sums)))
    assert len(counted) == 2 and all(0.0 < taken < 60.0 for taken in counted)


@pytest.mark.parametrize("at", [0, 3])
def test_a_rank_that_does_not_come_ends_the_call(at: int, tmp_path: Path) -> None:
    """To the first sum of a call or a later one: all that follows in the call is left out, and the other is told."""
    shape = SHAPES["llama-biases"]
    make_checkpoint(tmp_path, shape)
    file = new_segment(2)
    waiting, away = SharedMemorySums(file, 0, timeout_s=0.2), SharedMemorySums(file, 1, timeout_s=60.0)

    def come(num: int) -> None:
        for _ in range(num):
            away.add(torch.zeros(5, shape.hidden), away.room(5, shape.hidden))

    model = load(tmp_path, waiting)
    builds.set_threads(1)
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(come, 1 + at)  # that of embeddings, and so many within the call
        with pytest.raises(SumsBroken, match=r"rank 1 of 2 did not come to a sum within 0\.2 s; it is stuck") as caught:
            one_step(model)
        coming.result()
    assert caught.value.rank == 1
    come(1)  # too late: that is all that the other rank gave
    with pytest.raises(SumsBroken, match="rank 1 of 2 has given up"):
        away.agree(True)
