"""An EAGLE-3 head: it drafts what the plain model of `demo` would, after any movement of its blocks."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sluice_server.demo.head import BEHIND, Head, features_of
from sluice_server.demo.model import Llama, ModelShape
from sluice_server.engine.build import build_engine
from sluice_server.engine.config import EngineConfig
from sluice_server.engine.engine import Engine
from sluice_server.engine.errors import ServiceError
from sluice_server.engine.models.config import read_config, read_head_config
from sluice_server.engine.models.limits import limits_of
from sluice_server.engine.plan import DraftRequest, DraftTree
from sluice_server.engine.speculation.proposer import Draft, Proposer
from tests.engine.speculation.test_verification import SAMPLED, run
from tests.engine.test_engine_oracle import ROOMY, TIGHT, make_engine, named, some_prompts
from tests.oracle.checkpoints import Shape, make_checkpoint
from tests.oracle.heads import make_head

TARGET = Shape(layers=4, tied=True, context=256)
NUM_IDS = 40
NUM_DRAFTS = 4


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    target = make_checkpoint(tmp_path_factory.mktemp("target"), TARGET)
    return target, make_head(tmp_path_factory.mktemp("head"), TARGET, NUM_IDS, BEHIND)


def drafting(target: Path, head: Path, config: EngineConfig, num: int = NUM_DRAFTS) -> Engine:
    config = dataclasses.replace(
        config, speculation="eagle", draft_model="x", draft_length="fixed", max_draft_tokens=num
    )
    model = read_config(target)
    return build_engine(config, model, target, limits_of(config, model, 1 << 20), head, digests=named).engine


class Judge:
    """Compares greedy drafts of a proposer with those of the plain head for the same tokens."""

    writes_cache = True

    def __init__(self, proposer: Proposer, target: Path, head: Path) -> None:
        config = read_config(target)
        shape = ModelShape(
            *(config.vocab_size, config.hidden_size, config.intermediate_size, config.num_layers),
            *(config.num_heads, config.num_kv_heads, config.head_dim, config.context_length),
            norm_eps=config.norm_eps,
        )
        self._proposer = proposer
        self._target = Llama(shape)
        self._target.load_state_dict(load_file(target / "model.safetensors"))
        weights = load_file(head / "model.safetensors")
        self._ids = weights["d2t"] + torch.arange(len(weights["d2t"]))
        own = dataclasses.replace(shape, norm_eps=read_head_config(head).layer.norm_eps)
        self._head = Head(own, self._target, self._ids)
        self._head.load_state_dict(weights)
        self.num_asked = self.num_right = 0

    def propose(self, asks: Sequence[DraftRequest]) -> Sequence[Draft]:
        answers = self._proposer.propose(asks)
        for ask, answer in zip(asks, answers, strict=True):
            assert not isinstance(answer, DraftTree), "no tree was asked for"
            self.num_right += answer == self._drafts(ask.tokens, len(answer))
            self.num_asked += 1
        return answers

    @torch.no_grad()
    def _drafts(self, tokens: Sequence[int], num: int) -> list[int]:
        features = features_of(self._target, torch.tensor([tokens[:-1]]))[0].bfloat16().float()
        drafts: list[int] = []
        for age in range(num):
            none = features.new_zeros(1, age, features.shape[2])  # the target has not been there
            following = torch.tensor([[*tokens[1:], *drafts]])
            logits = self._head(torch.cat((features, none), dim=1), following, age + 1)[age]
            drafts.append(int(self._ids[logits[0, -1].argmax()]))
        return drafts


@pytest.mark.usefixtures("preempts_at_once")
@pytest.mark.parametrize("config", [ROOMY, TIGHT], ids=["roomy", "tight"])
def test_drafts_are_those_of_the_plain_head(models: tuple[Path, Path], config: EngineConfig) -> None:
    """In chunks and after preemption; without shared blocks, whose last entry may be another sequence's."""
    target, head = models
    config = dataclasses.replace(config, prefix_caching=False, max_num_batched_tokens=32)
    prompts = some_prompts(TARGET.vocab, 5)
    engine = drafting(target, head, config)
    assert engine.proposer is not None
    judge = Judge(engine.proposer, target, head)
    outputs = run(Engine(engine.scheduler, engine.runner, proposer=judge), prompts, temperature=0.0)
    assert outputs == run(make_engine(target, ROOMY), prompts, temperature=0.0)
    assert judge.num_asked == judge.num_right > 20
    assert (engine.scheduler.num_preemptions > 0) == (config.kv_cache_tokens == TIGHT.kv_cache_tokens)


@pytest.mark.parametrize(
    "formats",
    [{"dtype": "bfloat16"}, {"quantization": "int8", "kv_cache_dtype": "int8"}],
    ids=["bfloat16", "int8"],
)
def test_it_drafts_in_every_number_format(models: tuple[Path, Path], formats: dict[str, Any]) -> None:
    target, head = models
    prompts = some_prompts(TARGET.vocab, 3)
    engine = drafting(target, head, dataclasses.replace(ROOMY, **formats))
    assert len(run(engine, prompts, **SAMPLED)) == len(prompts)
    assert engine.scheduler.draft_stats.num_drafted > 0


@pytest.mark.parametrize("params", [SAMPLED, {**SAMPLED, "n": 3}, {"allowed_token_ids": (1,)}], ids=str)
def test_it_changes_no_token(
    models: tuple[Path, Path], tmp_path: Path, params: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Through all tiers, after hits, forks and preemption; also where none of the allowed tokens can be proposed."""
    target, head = models
    prompts = some_prompts(TARGET.vocab, 6)
    want = run(make_engine(target, ROOMY), prompts, **params)
    tiers = {"host_cache_bytes": 1 << 17, "disk_cache_bytes": 1 << 20, "disk_cache_dir": str(tmp_path)}
    narrow = dataclasses.replace(TIGHT, kv_cache_tokens=128, max_num_seqs=8, **tiers)  # type: ignore[arg-type] # mixed values
    for config in (ROOMY, narrow):
        engine = drafting(target, head, config)
        for _ in range(2):
            assert run(engine, prompts, **params) == want
        assert (engine.scheduler.draft_stats.num_drafted > 0) == ("allowed_token_ids" not in params)
    assert not [record for record in caplog.records if record.name.startswith("sluice_server.engine.speculation")]


@pytest.mark.parametrize(
    ("shape", "changes", "message"),
    [
        (dataclasses.replace(TARGET, vocab=112), {}, r"has a vocabulary of 112 ids, the model 111"),
        (dataclasses.replace(TARGET, hidden=32), {}, r"reads hidden states of 32 numbers, the model has \d+"),
        (dataclasses.replace(TARGET, intermediate=4096), {}, r"has \d+ parameters, the model \d+"),
        (TARGET, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 4]}}, r"reads behind the layers 1, 2, 5"),
        (
            TARGET,
            {"eagle_config": {}, "eagle_aux_hidden_state_layer_ids": [1, 1, 2]},
            r"reads behind the layers 2, 2, 1",
        ),
        (TARGET, {"draft_vocab_size": 500}, r"proposes 500 ids, the model has 111"),
    ],
    ids=["vocabulary", "hidden size", "size", "layers", "layers of default", "draft vocabulary"],
)
def test_a_head_that_does_not_fit_is_refused_with_both_numbers(
    models: tuple[Path, Path], tmp_path: Path, shape: Shape, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ServiceError, match=f"--draft-model: {message}"):
        drafting(models[0], make_head(tmp_path, shape, **changes), ROOMY)


@pytest.mark.parametrize(
    ("changes", "behind"),
    [
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}}, (1, 3, 4)),
        ({"eagle_config": None, "eagle_aux_hidden_state_layer_ids": [2, 16, 29]}, (2, 16, 29)),
        ({"eagle_config": None}, ()),
    ],
)
def test_both_spellings_of_the_layers_are_read(
    tmp_path: Path, changes: dict[str, Any], behind: tuple[int, ...]
) -> None:
    assert read_head_config(make_head(tmp_path, TARGET, **changes)).behind == behind
