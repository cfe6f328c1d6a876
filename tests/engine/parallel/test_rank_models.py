"""Random models of every architecture over ranks: logits against transformers, and the same bits over all sizes."""

import dataclasses
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from sluice_server.engine.models.config import ModelConfig, read_config
from sluice_server.engine.models.loading import load_model
from sluice_server.engine.models.model import Model
from sluice_server.engine.parallel.ranks import Ranks
from sluice_server.engine.parallel.shape import ParallelShape
from sluice_server.engine.parallel.sums import LocalSums, RankSums, thread_sums
from sluice_server.kernels.cpu import builds
from sluice_server.kernels.formats.packer import LinearPacker
from sluice_server.kernels.layout.metadata import AttentionMetadata
from tests.engine.models.test_model_oracle import GEMMA2, GPT_OSS, GRANITE
from tests.engine.parallel.rank_threads import WAIT_S, memory_sums, run_ranks
from tests.oracle.checkpoints import Shape, make_checkpoint, reference

CPU = torch.device("cpu")
TOKENS, CUTS, BLOCK = 40, (17, 1, 22), 8
EXPERTS = (("num_experts", 8), ("num_experts_per_tok", 3), ("moe_intermediate_size", 64))
SHARED = (*EXPERTS, ("shared_expert_intermediate_size", 128))
BASE = Shape(heads=8, kv_heads=2, head_dim=16, hidden=64, intermediate=128)
SHAPES = {
    "llama-biases": dataclasses.replace(BASE, options=(("attention_bias", True), ("mlp_bias", True))),
    "qwen3": dataclasses.replace(BASE, architecture="qwen3", kv_heads=8, tied=True),
    "olmo2": dataclasses.replace(BASE, architecture="olmo2", kv_heads=4),
    "phi3": dataclasses.replace(BASE, architecture="phi3", options=(("sliding_window", 10),)),
    "granite": dataclasses.replace(BASE, architecture="granite", options=GRANITE),
    "gemma2": dataclasses.replace(BASE, architecture="gemma2", layers=3, tied=True, options=GEMMA2),
    "qwen3-experts": dataclasses.replace(BASE, architecture="qwen3_moe", options=(*EXPERTS, ("norm_topk_prob", True))),
    "qwen2-shared": dataclasses.replace(BASE, architecture="qwen2_moe", options=SHARED),
    "qwen2-fused": dataclasses.replace(BASE, architecture="qwen2_moe", is_fused=True, options=SHARED),
    "gpt-oss": dataclasses.replace(
        BASE, architecture="gpt_oss", head_dim=32, options=(*GPT_OSS[1:], ("num_local_experts", 8))
    ),
}
WITH_EXPERTS = ("qwen3-experts", "qwen2-shared", "qwen2-fused", "gpt-oss")
CASES = [*((name, False) for name in SHAPES), *((name, True) for name in WITH_EXPERTS)]
IDS = [f"{name}-whole-experts" if whole else name for name, whole in CASES]


@dataclasses.dataclass(frozen=True)
class Served:
    """A checkpoint and how it is served."""

    path: Path
    config: ModelConfig
    dtype: torch.dtype
    weights: str
    expert_parallel: bool

    def logits(self, sums: RankSums) -> Tensor:
        """Logits of all tokens on one rank, in steps of several lengths."""
        shape = ParallelShape(sums.size, sums.rank, sum_shards=sums.shards, expert_parallel=self.expert_parallel)
        pack, ranks = LinearPacker(self.weights), Ranks(shape, sums)
        return computed(load_model(self.path, self.config, self.dtype, CPU, TOKENS, pack, ranks=ranks))

    def over(self, size: int, shards: int) -> Tensor:
        """Logits of rank 0 among so many."""
        if size == 1:
            return self.logits(LocalSums(shards))
        return run_ranks(memory_sums(size, shards), self.logits)[0] if builds.MODULE else self.by_calls(size, shards)

    def by_calls(self, size: int, shards: int) -> Tensor:
        """The same, with a call of Python for each sum."""
        return run_ranks(thread_sums(size, shards, timeout_s=WAIT_S), self.logits)[0]


def token_ids(vocab: int) -> list[int]:
    rng = random.Random(0)
    return [rng.randrange(vocab) for _ in range(TOKENS)]


def computed(model: Model) -> Tensor:
    """Logits of the tokens, computed in steps; of the last step only some tokens are wanted."""
    ids, tables = torch.tensor(token_ids(model.config.vocab_size)), np.arange(8, dtype=np.int32)[None]
    cache, start, found = model.new_cache(8, BLOCK), 0, []
    for num in CUTS:
        meta = AttentionMetadata.build([num], [start + num], tables, BLOCK, CPU)
        positions = torch.arange(start, start + num)
        kept = torch.arange(num - 3, num) if start + num == TOKENS else None
        found.append(model.forward(ids[start : start + num], positions, cache, meta, kept))
        start += num
    hidden = torch.cat(found)
    return model.logits(hidden) if model.is_last else hidden


def served(tmp_path: Path, case: tuple[str, bool], dtype: torch.dtype = torch.float32, weights: str = "") -> Served:
    name, expert_parallel = case
    make_checkpoint(tmp_path, SHAPES[name])
    return Served(tmp_path, read_config(tmp_path), dtype, weights, expert_parallel)


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_logits_over_ranks_equal_transformers(
    case: tuple[str, bool], ours: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With our own kernels where they exist, and with torch's operators alone."""
    if not ours:
        monkeypatch.setattr(builds, "MODULE", None)
    own = served(tmp_path, case)
    with torch.inference_mode():
        wanted = reference(tmp_path)(torch.tensor([token_ids(own.config.vocab_size)])).logits[0]
    wanted = torch.cat((wanted[: CUTS[0] + CUTS[1]], wanted[-3:]))
    sizes = (1, 2, 4) if own.config.architecture != "Olmo2ForCausalLM" else (1, 4)
    for size in sizes:
        torch.testing.assert_close(own.over(size, size), wanted, atol=2e-4, rtol=1e-3)


FORMATS = {"float32": (torch.float32, ""), "bfloat16": (torch.bfloat16, ""), "int8": (torch.float32, "int8")}


@pytest.mark.skipif(not builds.is_available(), reason="torch's operators promise no bits")
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_bits_depend_on_shards_and_not_on_ranks(case: tuple[str, bool], form: str, tmp_path: Path) -> None:
    own = served(tmp_path, case, *FORMATS[form])
    wanted = own.over(1, 4)
    for size in (2, 4):
        assert torch.equal(own.over(size, 4), wanted), f"{size} ranks"
    if form != "int8":  # whose groups of inputs with one scale are the same
        assert not torch.equal(own.over(1, 1), wanted), "shards change nothing: this compares nothing"


@pytest.mark.parametrize("case", [("qwen3", False), ("llama-biases", False), *((name, True) for name in WITH_EXPERTS)])
def test_four_bits_are_rounded_alike_on_all_sizes(case: tuple[str, bool], tmp_path: Path) -> None:
    """They are rounded by what is observed of their inputs, for which layers are computed while a model is loaded."""
    own = served(tmp_path, case, torch.float32, "int4")
    wanted = own.over(1, 4)
    assert all(torch.equal(own.over(size, 4), wanted) for size in (2, 4))


def test_ranks_name_what_all_of_them_observed(tmp_path: Path) -> None:
    """Each observes other inputs; what they tell of them is equal, as their layouts must be."""
    own = served(tmp_path, ("qwen3", False), torch.float32, "int4")
    pack = LinearPacker("int4")

    def observed(sums: RankSums) -> str:
        ranks = Ranks(ParallelShape(sums.size, sums.rank), sums)
        return load_model(tmp_path, own.config, torch.float32, CPU, TOKENS, pack, ranks=ranks).observed

    first, second = run_ranks(thread_sums(2, timeout_s=60.0), observed)
    assert first == second != load_model(tmp_path, own.config, torch.float32, CPU, TOKENS, pack).observed
