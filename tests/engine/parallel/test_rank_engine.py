"""The whole engine over 2 and 4 ranks: the tokens of one rank, whatever a request asks for."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.engine import Engine
from sluice_server.engine.request import EngineRequest, SamplingParams
from tests.engine.parallel.test_rank_models import SHAPES
from tests.engine.parallel.thread_ranks import threaded
from tests.engine.speculation.test_verification import run as run_all
from tests.engine.test_engine_oracle import ROOMY, TIGHT, make_engine, run, some_prompts
from tests.engine.test_engine_search import run as run_search
from tests.engine.test_structured_output import run as run_structured
from tests.engine.test_structured_output import schema_grammar
from tests.oracle.checkpoints import make_checkpoint
from tests.oracle.heads import make_head
from tests.oracle.schemas import SCHEMAS
from tests.oracle.tokenizers import byte_level_bpe

NAMES = ("llama-biases", "phi3", "gemma2", "qwen3-experts", "gpt-oss")
SMALL = dataclasses.replace(TIGHT, threads=1)  # only one thread may use the kernels' pool
HOST = dataclasses.replace(SMALL, host_cache_bytes=1 << 18)
SIZES = (2, 4)


def over(config: EngineConfig, size: int, **changes: Any) -> EngineConfig:  # noqa: ANN401 # of settings' types
    return dataclasses.replace(config, tensor_parallel_size=size, **changes)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama"), SHAPES["llama-biases"])


@pytest.mark.usefixtures("preempts_at_once")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_chunks_prefix_hits_and_preemption(tmp_path: Path, name: str, size: int) -> None:
    directory = make_checkpoint(tmp_path, SHAPES[name])
    prompts = some_prompts(SHAPES[name].vocab, 6)
    want = run(make_engine(directory, SMALL), prompts)
    with threaded(directory, over(SMALL, size)) as engine:
        assert run(engine, prompts) == want
        assert engine.scheduler.num_preemptions > 0 or name == "phi3"  # its window frees blocks
    with threaded(directory, over(ROOMY, size)) as engine:
        assert run(engine, prompts) == want
        assert run(engine, prompts) == want
        assert engine.scheduler.cache.stats.hit_tokens > 0


def test_blocks_go_to_host_memory_and_come_back(llama: Path) -> None:
    prompts = some_prompts(SHAPES["llama-biases"].vocab, 9)
    want = run(make_engine(llama, HOST), prompts)
    with threaded(llama, over(HOST, 2)) as engine:
        for _ in range(2):
            assert run(engine, prompts) == want
        tiers = engine.scheduler.cache.tiers
        assert tiers is not None and tiers.stats.num_restored


@pytest.mark.parametrize("shape", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["sums", "stages"])
def test_blocks_go_to_disk_and_come_back(llama: Path, tmp_path: Path, shape: dict[str, Any]) -> None:
    """Each rank has files of its own. A block is there if every rank has it; a group finds what one before it saved."""
    block = 2 * 8 * SHAPES["llama-biases"].kv_heads * SHAPES["llama-biases"].head_dim * 4
    sizes: dict[str, Any] = {"host_cache_bytes": 24 * block, "disk_cache_bytes": 240 * block}
    config = dataclasses.replace(SMALL, disk_cache_dir=str(tmp_path), **sizes, **shape)
    prompts = some_prompts(SHAPES["llama-biases"].vocab, 9)
    want = run(make_engine(llama, SMALL), prompts)
    with threaded(llama, config) as engine:
        for _ in range(3):
            assert run(engine, prompts) == want
        tiers = engine.scheduler.cache.tiers
        assert tiers is not None and tiers.stats.num_written and not tiers.stats.num_failed
    own, other = sorted(tmp_path.iterdir())
    assert own.name.endswith("rank0") and other.name.endswith("rank1")
    saved = {file.name for file in own.glob("*.kv")}
    assert saved == {file.name for file in other.glob("*.kv")} and saved
    (other / f"{'0' * 64}.kv").write_bytes(b"of an earlier group")
    damaged = sorted(saved)[::2]
    for name in damaged:
        (other / name).write_bytes(b"damaged")
    with threaded(llama, config) as engine:
        for _ in range(2):
            assert run(engine, prompts) == want
        tiers = engine.scheduler.cache.tiers
        assert tiers is not None and tiers.stats.num_failed
        assert engine.scheduler.cache.stats.hit_tokens > 0
    left = {file.name: file.stat().st_size for file in other.glob("*.kv")}
    assert f"{'0' * 64}.kv" not in left and left.keys() == {file.name for file in own.glob("*.kv")}


def sampled(engine: Engine) -> object:
    """What requests get that ask for everything but a search."""
    params: dict[str, Any] = {"temperature": 0.8, "seed": 3, "n": 2, "repetition_penalty": 1.2}
    tokens = run_all(engine, some_prompts(SHAPES["llama-biases"].vocab, 4), **params)
    return {name: ids for name, (ids, _) in tokens.items()}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("speculation", ["none", "ngram"])
def test_several_outputs_with_penalties_and_drafts(llama: Path, size: int, speculation: str) -> None:
    want = sampled(make_engine(llama, SMALL))
    with threaded(llama, over(SMALL, size, speculation=speculation, draft_length="fixed")) as engine:
        assert sampled(engine) == want


def test_a_draft_model_of_rank_0(llama: Path) -> None:
    """It has every token, so that all its drafts are right; its trees move keys on all ranks."""
    settings = {"draft_model": "x", "draft_length": "fixed", "max_draft_tokens": 6, "max_draft_width": 3}
    prompts = some_prompts(SHAPES["llama-biases"].vocab, 4)
    want = run(make_engine(llama, ROOMY), prompts)
    with threaded(llama, over(ROOMY, 2, speculation="draft", **settings), draft=llama) as engine:
        assert run(engine, prompts) == want
        assert engine.scheduler.draft_stats.num_accepted > 10


@pytest.mark.parametrize(("behind", "width"), [((1, 2, 3), 1), ((2, 3, 4), 3)], ids=["chain", "tree, last layer"])
def test_an_eagle_head_of_rank_0(tmp_path: Path, behind: tuple[int, int, int], width: int) -> None:
    """It reads sums of all ranks, also behind the last layer, and has no embeddings of its own."""
    shape = dataclasses.replace(SHAPES["llama-biases"], layers=4)
    (tmp_path / "model").mkdir()
    (tmp_path / "head").mkdir()
    directory = make_checkpoint(tmp_path / "model", shape)
    head = make_head(tmp_path / "head", shape, behind=behind)
    config = dataclasses.replace(ROOMY, sum_shards=2)
    prompts = some_prompts(shape.vocab, 4)
    drafts: dict[str, Any] = {
        "speculation": "eagle",
        "draft_model": "x",
        "draft_length": "fixed",
        "max_draft_width": width,
    }
    want = run(make_engine(directory, config), prompts)
    alone = make_engine(directory, dataclasses.replace(config, **drafts), draft=head)
    assert run(alone, prompts) == want
    with threaded(directory, over(config, 2, **drafts), draft=head) as engine:
        assert run(engine, prompts) == want
        assert engine.scheduler.draft_stats == alone.scheduler.draft_stats, "the same drafts, and so the same states"
        assert engine.scheduler.draft_stats.num_drafted > 20


@pytest.mark.parametrize("size", SIZES)
def test_beams(llama: Path, size: int) -> None:
    prompts = some_prompts(SHAPES["llama-biases"].vocab, 3)
    params = {"beam_width": 3, "n": 2, "temperature": 0.0}
    want = run_search(make_engine(llama, SMALL), prompts, **params)
    with threaded(llama, over(SMALL, size)) as engine:
        assert run_search(engine, prompts, **params) == want


def scores(engine: Engine) -> list[float]:
    engine.add(EngineRequest("a" * 32, tuple(range(3, 40)), SamplingParams(max_tokens=3, prompt_logprobs=1)))
    found: list[float] = []
    while engine.has_work:
        events = engine.step()
        assert not events.failed
        for event in events.sampled:
            if event.admission is not None:
                found += [score.logprob for score in event.admission.prompt_scores or ()]
    return found


@pytest.mark.parametrize("size", SIZES)
def test_prompt_logprobs(llama: Path, size: int) -> None:
    want = scores(make_engine(llama, SMALL))
    with threaded(llama, over(SMALL, size)) as engine:
        assert scores(engine) == pytest.approx(want, abs=1e-4)
    assert len(want) == 36


@pytest.mark.parametrize(
    "formats", [{"dtype": "bfloat16"}, {"quantization": "int8"}, {"kv_cache_dtype": "int8"}], ids=str
)
def test_the_tokens_of_one_rank_that_adds_as_many_parts(llama: Path, formats: dict[str, Any]) -> None:
    """With as many sums the bits are those of one rank, in formats where a near tie would show."""
    prompts = some_prompts(SHAPES["llama-biases"].vocab, 8)
    want = run(make_engine(llama, dataclasses.replace(SMALL, sum_shards=4, **formats)), prompts)
    for size in SIZES:
        with threaded(llama, over(SMALL, size, sum_shards=4, **formats)) as engine:
            assert run(engine, prompts) == want


def structured(folder: Path) -> tuple[Path, dict[str, SamplingParams]]:
    """A model with a tokenizer, and requests with grammars."""
    directory = make_checkpoint(folder, dataclasses.replace(SHAPES["llama-biases"], vocab=404, context=1024))
    byte_level_bpe(directory)
    asked = {
        name: SamplingParams(max_tokens=120, temperature=1.0, seed=at, n=2, grammar=schema_grammar(SCHEMAS[name]))
        for at, name in enumerate(("person", "order", "tree"))
    }
    return directory, asked


@pytest.mark.parametrize("size", SIZES)
def test_grammars(tmp_path: Path, size: int) -> None:
    """Rank 0 alone masks and samples; with drafts it reads masks at several places of a sequence."""
    directory, asked = structured(tmp_path)
    config = dataclasses.replace(SMALL, kv_cache_tokens=320)
    want = run_structured(make_engine(directory, config), asked)
    with threaded(directory, over(config, size, speculation="ngram", draft_length="fixed")) as engine:
        assert run_structured(engine, asked) == want
