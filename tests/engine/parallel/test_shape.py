"""The parts of a model that ranks own: together everything once, KV heads as often as their query heads need them."""

import dataclasses
from typing import Any

import pytest

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.models.by_layer import RopeConfig
from sluice_server.engine.models.config import ModelConfig
from sluice_server.engine.models.expert_fields import ExpertsConfig
from sluice_server.engine.parallel.options import shape_of
from sluice_server.engine.parallel.shape import ParallelShape
from sluice_server.engine.request import SamplingParams

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=111,
    hidden_size=48,
    num_layers=5,
    num_heads=8,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=88,
    norm_eps=1e-6,
    rope=RopeConfig(),
    windows=(None,) * 5,
    context_length=256,
    tied_embeddings=False,
    attention_bias=False,
    mlp_bias=False,
    eos_ids=(2,),
    dtype="float32",
    defaults=SamplingParams(),
)
EXPERTS = ExpertsConfig(6, 2, 24, renormalises=True, layers=(True,) * 5, shared_size=40)


def ranks(size: int) -> list[ParallelShape]:
    return [ParallelShape(tensor_size=size, rank=rank) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_ranks_own_every_head_once_with_the_kv_head_that_it_reads(size: int) -> None:
    for shape in ranks(size):
        shape.check(CONFIG)
        heads, kv_heads = shape.heads(CONFIG), shape.kv_heads(CONFIG)
        repeats = len(heads) // len(kv_heads)
        assert [head // 4 for head in heads] == [kv_heads[i // repeats] for i in range(len(heads))]
    assert [head for shape in ranks(size) for head in shape.heads(CONFIG)] == list(range(8))


@pytest.mark.parametrize(("size", "vocab"), [(1, 111), (2, 111), (4, 111), (4, 20), (4, 5)])
def test_every_id_is_owned_once(size: int, vocab: int) -> None:
    found = [shape.vocabulary(vocab) for shape in ranks(size)]
    assert [one for part in found for one in part] == list(range(vocab))
    assert min(map(len, found)) >= vocab // size


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_stages_own_consecutive_layers(stages: int) -> None:
    found = [ParallelShape(pipeline_size=stages, stage=stage).layers(5) for stage in range(stages)]
    assert [layer for part in found for layer in part] == list(range(5))
    assert max(map(len, found)) - min(map(len, found)) <= 1


def test_members_count_through_the_ranks_of_each_stage() -> None:
    group = ParallelShape(tensor_size=2, pipeline_size=3, sum_shards=4)
    assert [group.of_member(num).member for num in range(group.members)] == list(range(6))
    assert [group.of_member(num).stage for num in range(group.members)] == [2, 2, 1, 1, 0, 0]
    own = group.of_member(1)
    assert (own.stage, own.rank, own.is_first, own.is_last, own.rank_shards) == (2, 1, False, True, 2)


def test_no_shards_are_one_for_each_rank() -> None:
    assert ParallelShape(tensor_size=4).sum_shards == 4
    assert ParallelShape().is_whole
    assert not ParallelShape(sum_shards=2).is_whole


def test_whole_experts_are_shared_out_where_that_is_asked_for() -> None:
    own = ParallelShape(tensor_size=2, rank=1, expert_parallel=True)
    own.check(dataclasses.replace(CONFIG, experts=EXPERTS))
    assert own.experts(6) == range(3, 6)
    assert ParallelShape(tensor_size=2, rank=1).experts(6) == range(6)


BAD: list[tuple[dict[str, object], dict[str, object], str]] = [
    ({"tensor_size": 3}, {}, "--tensor-parallel-size: 3 does not divide the model's 8 attention heads"),
    (
        {"tensor_size": 4},
        {"num_heads": 12, "num_kv_heads": 6},
        "--tensor-parallel-size: 4 neither divides the model's 6 key/value heads nor is a multiple of them",
    ),
    (
        {"tensor_size": 2},
        {"intermediate_size": 87},
        "--tensor-parallel-size: 2 does not divide the model's intermediate size, 87",
    ),
    (
        {"tensor_size": 2, "sum_shards": 16},
        {},
        "--sum-shards: 16 does not divide the model's intermediate size, 88",
    ),
    (
        {"sum_shards": 3},
        {},
        "--sum-shards: 3 does not divide the model's inputs of the projection behind attention, 128",
    ),
    (
        {"tensor_size": 2},
        {"experts": dataclasses.replace(EXPERTS, intermediate_size=25)},
        "--tensor-parallel-size: 2 does not divide the model's intermediate size of an expert, 25",
    ),
    (
        {"tensor_size": 2},
        {"experts": dataclasses.replace(EXPERTS, shared_size=41)},
        "--tensor-parallel-size: 2 does not divide the model's intermediate size of the shared expert, 41",
    ),
    ({"tensor_size": 2, "expert_parallel": True}, {}, "--expert-parallel: the model has no experts"),
    (
        {"tensor_size": 4, "expert_parallel": True},
        {"experts": EXPERTS},
        "--expert-parallel: --tensor-parallel-size 4 does not divide 6 experts",
    ),
    (
        {"tensor_size": 2, "sum_shards": 4, "expert_parallel": True},
        {"experts": EXPERTS},
        "--sum-shards: 4 does not divide 6 experts",
    ),
    ({"tensor_size": 8}, {"vocab_size": 7}, "--tensor-parallel-size: 8 is above the model's vocabulary of 7"),
    ({"pipeline_size": 6}, {}, "--pipeline-parallel-size: 6 is above the model's 5 layers"),
]


@pytest.mark.parametrize(("sizes", "fields", "message"), BAD, ids=[message for _, _, message in BAD])
def test_a_model_that_cannot_be_shared_out_is_refused_by_name(
    sizes: dict[str, Any], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ServiceError) as error:
        ParallelShape(**sizes).check(dataclasses.replace(CONFIG, **fields))
    assert error.value.message.startswith(message)
    assert error.value.code is Code.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 0}, "--tensor-parallel-size: 0 is below 1"),
        ({"pipeline_parallel_size": -1}, "--pipeline-parallel-size: -1 is below 1"),
        ({"sum_shards": -4}, "--sum-shards: -4 is below 0"),
        (
            {"tensor_parallel_size": 4, "sum_shards": 2},
            "--sum-shards: 2 is no multiple of --tensor-parallel-size 4: take one, such as 4",
        ),
    ],
)
def test_sizes_that_exclude_one_another_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ServiceError) as error:
        shape_of(EngineConfig(**options))
    assert error.value.message == message


def test_settings_become_the_shape_of_a_group() -> None:
    config = EngineConfig(tensor_parallel_size=2, pipeline_parallel_size=3, expert_parallel=True, sum_shards=8)
    assert shape_of(config) == ParallelShape(2, 0, 3, 2, 8, expert_parallel=True)
