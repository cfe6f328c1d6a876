"""Engines with adapters against `transformers` on merged weights, with chunks, batches, cache hits, preemption."""

import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sluice_server.engine.adapters.build import check_adapters
from sluice_server.engine.adapters.files import read_adapter
from sluice_server.engine.config import EngineConfig
from sluice_server.engine.engine import Engine
from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.models.config import ModelConfig, read_config
from sluice_server.engine.request import AdapterRef, EngineRequest, Pooling, SamplingParams
from tests.engine.test_engine_oracle import ROOMY, SHAPES, make_engine, some_prompts, tight
from tests.oracle.adapters import merged, modules, write_adapter
from tests.oracle.checkpoints import Shape, greedy, make_checkpoint, reference

NUM = 16
GREEDY = SamplingParams(max_tokens=NUM, temperature=0.0, ignore_eos=True)
ADAPTERS: dict[str, dict[str, Any]] = {  # of ranks 1 to 64, of subsets, with either scale and a pattern
    "all": {"rank": 3},
    "one": {"rank": 1, "targets": ("v_proj", "qkv_proj")},
    "some": {"rank": 8, "targets": ("v_proj", "up_proj", "o_proj", "qkv_proj", "gate_up_proj")},
    "stabilised": {"rank": 64, "use_rslora": True, "lora_alpha": 1, "rank_pattern": {"o_proj": 5}},
    "queries": {"rank": 2, "targets": ("q_proj", "qkv_proj")},
    "mlp": {"rank": 4, "targets": ("gate_proj", "down_proj", "gate_up_proj", "o_proj")},
    "weak": {"rank": 16, "lora_alpha": 1},
}


def write_all(folder: Path, config: ModelConfig, names: Mapping[str, dict[str, Any]] = ADAPTERS) -> None:
    """Writes adapters of these names."""
    for seed, (name, fields) in enumerate(names.items()):
        write_adapter(folder / name, config, seed=seed, **fields)


def with_adapters(config: EngineConfig, folder: Path, num_slots: int = 8, **fields: Any) -> EngineConfig:  # noqa: ANN401 # of its types
    return dataclasses.replace(config, max_adapters=num_slots, adapter_dir=str(folder), **fields)


def load(engine: Engine, path: str, *, is_pinned: bool = False) -> AdapterRef:
    """Loads an adapter, and returns how requests name it."""
    assert engine.adapters is not None
    loaded = engine.adapters.read(path).result()
    engine.adapters.add(loaded, is_pinned=is_pinned)
    return AdapterRef(loaded.digest, path, loaded.num_bytes)


def run(engine: Engine, *requests: EngineRequest) -> dict[str, list[int]]:
    """Tokens of every request, all sent at once."""
    for one in requests:
        engine.add(one)
    out: dict[str, list[int]] = {one.request_id: [] for one in requests}
    while engine.has_work:
        events = engine.step()
        engine.scheduler.check()
        assert not events.failed
        for event in events.sampled:
            out[event.request_id].extend(event.token_ids)
    assert engine.scheduler.cache.pool.num_held == 0
    return out


QUICK = {"llama", "phi3", "qwen2-experts"}  # heads of their own, fused projections, experts
MADE = [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in SHAPES]


@pytest.fixture(scope="module", params=MADE)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Shape]:
    """A checkpoint, with adapters beside it."""
    shape = SHAPES[request.param]
    directory = make_checkpoint(tmp_path_factory.mktemp(request.param) / "base", shape)
    write_all(directory.parent / "adapters", read_config(directory))
    return directory, shape


def test_a_batch_of_adapters_and_base_rows_equals_merged_weights(made: tuple[Path, Shape]) -> None:
    """Nine prompts over seven adapters and the base, in chunks, preempted, and again through what is cached."""
    directory, shape = made
    folder, config = directory.parent / "adapters", read_config(directory)
    names = itertools.cycle([None, *ADAPTERS])
    asked = {name: (prompt, next(names)) for name, prompt in some_prompts(shape.vocab, 9).items()}
    oracles = {
        name: merged(directory, read_adapter(folder, name, modules(config))) if name else reference(directory)
        for name in {adapter for _, adapter in asked.values()}
    }
    want = {name: greedy(oracles[adapter], prompt, NUM) for name, (prompt, adapter) in asked.items()}
    for base in (tight(shape), ROOMY):
        engine = make_engine(directory, with_adapters(base, folder))
        refs = {name: load(engine, name) for name in ADAPTERS}
        requests = [
            EngineRequest(name, tuple(prompt), GREEDY, adapter=refs[adapter] if adapter else None)
            for name, (prompt, adapter) in asked.items()
        ]
        assert run(engine, *requests) == want
        assert run(engine, *requests) == want  # now with what is left of the prefixes
        assert engine.scheduler.num_preemptions > 0 or base is ROOMY
    assert engine.scheduler.cache.stats.hit_tokens > 0


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, with adapters beside it."""
    directory = make_checkpoint(tmp_path_factory.mktemp("llama") / "base", SHAPES["llama"])
    write_all(directory.parent / "adapters", read_config(directory))
    return directory


def asking(name: str, prompt: list[int], adapter: AdapterRef | None = None, **params: Any) -> EngineRequest:  # noqa: ANN401 # of SamplingParams
    return EngineRequest(name, tuple(prompt), dataclasses.replace(GREEDY, **params), adapter=adapter)


PROMPT = [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17]


FORMATS = {
    "float32": ROOMY,
    "bfloat16": dataclasses.replace(ROOMY, dtype="bfloat16"),
    **{name: dataclasses.replace(ROOMY, quantization=name) for name in ("int8", "int4")},
}


@pytest.mark.parametrize("config", FORMATS.values(), ids=FORMATS)
def test_tokens_do_not_depend_on_company(llama: Path, config: EngineConfig) -> None:
    """Alone and beside others: base rows too, of which some steps are computed without products beside them."""
    engine = make_engine(llama, with_adapters(config, llama.parent / "adapters"))
    refs = [None, *(load(engine, name) for name in ("all", "some", "mlp"))]
    requests = [asking(f"{i:032x}", PROMPT, ref, temperature=1.0, seed=i) for i, ref in enumerate(refs)]
    together = run(engine, *requests)
    alone = make_engine(llama, with_adapters(config, llama.parent / "adapters", prefix_caching=False))
    for i, request in enumerate(requests):
        if request.adapter is not None:
            load(alone, request.adapter.path)
        assert run(alone, request)[request.request_id] == together[request.request_id], i
    assert len({tuple(tokens) for tokens in together.values()}) == len(requests)


@pytest.mark.parametrize("num", [1, 2])
def test_every_request_ends_although_memory_holds_few_adapters(llama: Path, num: int) -> None:
    """They are read again and again from their folders, and each comes to its turn."""
    folder = llama.parent / "adapters"
    free = make_engine(llama, with_adapters(ROOMY, folder))
    sizes = sorted(load(free, name).num_bytes for name in ADAPTERS)
    settings = with_adapters(dataclasses.replace(ROOMY, max_num_seqs=4), folder, adapter_turn_s=0.02)
    engine = make_engine(llama, dataclasses.replace(settings, adapter_host_bytes=sum(sizes[-num:])))
    refs = {name: load(engine, name) for name in ADAPTERS}
    requests = [asking(f"{i:032x}", PROMPT, refs[name]) for i, name in enumerate([*ADAPTERS] * 3)]
    requests += [asking(f"{i:032x}", PROMPT) for i in range(100, 103)]
    assert run(engine, *requests) == run(free, *requests)
    assert engine.adapters is not None and engine.adapters.num_evictions >= len(ADAPTERS) - num
    assert engine.adapters.loader.num_reads > len(ADAPTERS)


def test_all_adapters_in_host_memory_run_in_one_step(llama: Path) -> None:
    """More than --max-adapters: a CPU has no slots of its own that could be too few."""
    engine = make_engine(llama, with_adapters(ROOMY, llama.parent / "adapters", num_slots=1))
    refs = [load(engine, name) for name in ADAPTERS]
    engine.step()
    for index, ref in enumerate(refs):
        engine.add(asking(f"{index:032x}", PROMPT, ref))
    assert len(engine.step().sampled) == len(ADAPTERS)
    assert engine.adapters is not None and engine.adapters.loader.num_reads == len(ADAPTERS)


def test_forks_beams_drafts_and_resumption_go_on_with_the_adapter(llama: Path) -> None:
    """Outputs of one request are those of several, also behind a resume; drafts change nothing."""
    folder = llama.parent / "adapters"
    engine = make_engine(llama, with_adapters(ROOMY, folder))
    drafting = make_engine(llama, with_adapters(dataclasses.replace(ROOMY, speculation="ngram"), folder))
    ref = load(engine, "all")
    load(drafting, "all")
    whole = run(engine, asking("a" * 32, PROMPT * 3, ref))["a" * 32]
    assert run(drafting, asking("a" * 32, PROMPT * 3, ref))["a" * 32] == whole
    resumed = dataclasses.replace(asking("b" * 32, PROMPT * 3, ref), resume_ids=(tuple(whole[:5]),))
    assert run(engine, resumed)["b" * 32] == whole[5:]
    both = run(engine, asking("c" * 32, PROMPT, ref, n=2, temperature=1.0, seed=5))["c" * 32]
    assert sorted(both) == sorted(run(drafting, asking("c" * 32, PROMPT, ref, n=2, temperature=1.0, seed=5))["c" * 32])
    beams = run(engine, asking("d" * 32, PROMPT, ref, beam_width=3, n=2))["d" * 32]
    assert beams != run(engine, asking("d" * 32, PROMPT, beam_width=3, n=2))["d" * 32]


def test_a_source_that_is_gone_fails_its_requests_and_no_others(llama: Path, tmp_path: Path) -> None:
    """Read once, forgotten since host memory is small, then changed: never the base's answer, and never another's."""
    write_all(tmp_path, read_config(llama), {"first": {"rank": 8}, "second": {"rank": 8}})
    engine = make_engine(llama, with_adapters(ROOMY, tmp_path, num_slots=1))
    first = load(engine, "first")
    tight = make_engine(llama, with_adapters(ROOMY, tmp_path, 1, adapter_host_bytes=first.num_bytes))
    first, second = load(tight, "first"), load(tight, "second")
    assert run(tight, asking("a" * 32, PROMPT, second))["a" * 32] != run(tight, asking("b" * 32, PROMPT))["b" * 32]
    write_adapter(tmp_path / "first", read_config(llama), rank=8, seed=99)
    tight.add(asking("c" * 32, PROMPT, first))
    tight.add(asking("d" * 32, PROMPT))
    failed: dict[str, ServiceError] = {}
    ended: set[str] = set()
    while tight.has_work:
        events = tight.step()
        failed |= dict(events.failed)
        ended |= {one.request_id for one in events.sampled if one.finish is not None}
        tight.scheduler.check()
    assert (set(failed), ended) == ({"c" * 32}, {"d" * 32})
    assert (failed["c" * 32].code, failed["c" * 32].reason) == (Code.FAILED_PRECONDITION, "ADAPTER_LOST")
    again = load(tight, "first")
    assert again.digest != first.digest and run(tight, asking("e" * 32, PROMPT, again))


def test_loads_take_their_share_of_a_core_beside_steps_and_all_of_it_without(llama: Path) -> None:
    engine = make_engine(llama, with_adapters(ROOMY, llama.parent / "adapters"))
    assert engine.adapters is not None
    loader, found = engine.adapters.loader, set()
    assert loader.pace.share == 1.0
    engine.add(EngineRequest("r", (1, 2, 3), GREEDY))
    engine.step()
    engine.step()  # which learns that a sequence runs
    while engine.has_work:
        engine.step()
        found.add(loader.pace.share)
    assert found == {loader.least} and loader.least < 1.0
    engine.idle()
    assert loader.pace.share == 1.0
    engine.add(EngineRequest("s", (1, 2, 3), GREEDY, adapter=load(engine, "one")))
    while engine.has_work:
        engine.step()
    engine.idle()
    assert loader.pace.share == 1.0


def test_an_adapter_is_dropped_when_its_last_request_has_ended(llama: Path) -> None:
    engine = make_engine(llama, with_adapters(ROOMY, llama.parent / "adapters"))
    assert engine.adapters is not None
    ref = load(engine, "all")
    engine.add(asking("a" * 32, PROMPT, ref))
    engine.step()
    engine.adapters.drop(ref.digest)
    assert [one.digest for one in engine.adapters.residencies()] == [ref.digest]
    while engine.has_work:
        assert not engine.step().failed
    assert list(engine.adapters.residencies()) == []
    shelf = engine.adapters.requests.shelf
    engine.adapters.idle()
    assert (shelf.slot_bytes, shelf.host_bytes) == (0, 0)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"max_adapters": 2, "adapter_dir": "/nowhere"}, "there is no directory '/nowhere'"),
    ],
)
def test_what_adapters_cannot_be_combined_with_is_refused_at_the_start(
    llama: Path, changes: dict[str, Any], part: str
) -> None:
    with pytest.raises(ServiceError, match=part):
        make_engine(llama, dataclasses.replace(ROOMY, **changes))
    with pytest.raises(ServiceError, match="256 on a GPU: at most 255"):
        check_adapters(dataclasses.replace(ROOMY, max_adapters=256), "cuda")


def test_one_that_never_fits_and_pins_without_room_are_refused(llama: Path) -> None:
    folder = llama.parent / "adapters"
    first, second = (load(make_engine(llama, with_adapters(ROOMY, folder)), name).num_bytes for name in ("all", "mlp"))
    engine = make_engine(llama, with_adapters(ROOMY, folder, adapter_host_bytes=first + second))
    ref = load(engine, "all", is_pinned=True)
    other, third = load(engine, "mlp"), load(engine, "one")
    assert engine.adapters is not None
    with pytest.raises(ServiceError, match="pin fewer"):
        load(engine, "mlp", is_pinned=True)
    assert {one.digest for one in engine.adapters.residencies()} == {one.digest for one in (ref, other, third)}
    with pytest.raises(ServiceError, match="larger --adapter-host-bytes"):
        engine.add(asking("a" * 32, PROMPT, dataclasses.replace(ref, digest=b"x" * 32, num_bytes=1 << 40)))
    with pytest.raises(ServiceError, match="digest has 3 bytes"):
        engine.add(asking("a" * 32, PROMPT, dataclasses.replace(ref, digest=b"xyz")))
    with pytest.raises(ServiceError, match="not supported for vectors"):
        engine.add(dataclasses.replace(asking("a" * 32, PROMPT, ref), pooling=Pooling.LAST))
