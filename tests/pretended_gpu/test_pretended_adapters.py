"""Adapters on a pretended device: tokens of merged weights, recorded steps, slots and their memory."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

from sluice_server.engine.adapters.files import read_adapter
from sluice_server.engine.engine import Engine
from sluice_server.engine.errors import ServiceError
from sluice_server.engine.models.config import read_config
from sluice_server.engine.request import AdapterRef, EngineRequest, SamplingParams
from sluice_server.engine.worker import graphs
from sluice_server.engine.worker.graphs import RowShape
from sluice_server.engine.worker.runner import Runner
from sluice_server.engine.worker.startup import allocation
from tests.oracle.adapters import merged, modules, write_adapter
from tests.oracle.checkpoints import greedy, make_checkpoint, reference
from tests.pretended_gpu.cuda import pretend
from tests.pretended_gpu.test_pretended_engines import INVARIANT, LOOK_UP, SHAPES, W8A16, build, checkpoint

NUM = 4
Asked: TypeAlias = Mapping[str, tuple[tuple[int, ...], str | None]]  # prompt and adapter of each request
# Of ranks 1 to 40, of subsets, with either scale and a pattern.
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"rank": 3},
    "one": {"rank": 1, "targets": ("v_proj",)},
    "some": {"rank": 8, "targets": ("v_proj", "up_proj", "o_proj")},
    "stabilised": {"rank": 40, "use_rslora": True, "lora_alpha": 1, "rank_pattern": {"o_proj": 5}},
    "queries": {"rank": 2, "targets": ("q_proj",)},
    "mlp": {"rank": 4, "targets": ("gate_proj", "down_proj")},
    "weak": {"rank": 16, "lora_alpha": 1},
    "keys": {"rank": 33, "targets": ("k_proj", "o_proj")},
}
ADAPTER_BYTES = 1 << 20
FEW = {"max_num_seqs": 3, "max_num_batched_tokens": 16}


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records steps of one size for each form, and does not measure what they take: both take long here."""
    monkeypatch.setattr(allocation, "cache_room", lambda *_: 1 << 30)
    monkeypatch.setattr(graphs, "sizes", lambda most: ([most], []))
    monkeypatch.setattr(graphs, "mixed_keys", lambda rows, num: ([graphs.GraphKey(rows, num, RowShape.MIXED)], []))


def prepared(directory: Path, architecture: str = "llama") -> Path:
    """A checkpoint with adapters beside it."""
    base = make_checkpoint(directory / "base", SHAPES[architecture])
    for seed, (name, fields) in enumerate(ADAPTERS.items()):
        write_adapter(directory / name, read_config(base), seed=seed, **fields)
    return base


def engine_of(base: Path, **changes: Any) -> Engine:  # noqa: ANN401 # of settings' types
    settings = {"max_adapters": 8, "adapter_dir": str(base.parent), "adapter_bytes": ADAPTER_BYTES, **changes}
    return build(base, **settings)


def load(engine: Engine, name: str, *, is_pinned: bool = False) -> AdapterRef:
    assert engine.adapters is not None
    loaded = engine.adapters.read(name).result(60)
    engine.adapters.add(loaded, is_pinned=is_pinned)
    return AdapterRef(loaded.digest, loaded.path, loaded.num_bytes)


def asking(name: str, prompt: tuple[int, ...], adapter: AdapterRef | None = None, num: int = NUM) -> EngineRequest:
    params = SamplingParams(max_tokens=num, temperature=0.0, ignore_eos=True)
    return EngineRequest(name, prompt, params, adapter=adapter)


def run(engine: Engine, *requests: EngineRequest) -> dict[str, list[int]]:
    """The tokens of requests that are computed together."""
    for request in requests:
        engine.add(request)
    found: dict[str, list[int]] = {request.request_id: [] for request in requests}
    while engine.has_work:
        events = engine.step()
        assert not events.failed
        for event in events.sampled:
            found[event.request_id] += event.token_ids
        engine.scheduler.check()
    return found


def wanted(base: Path, asked: Asked, num: int = NUM) -> dict[str, list[int]]:
    """The same according to transformers, with weights into which the adapter is merged."""
    config, found = read_config(base), {}
    for name, (prompt, adapter) in asked.items():
        own = None if adapter is None else read_adapter(base.parent, adapter, modules(config))
        found[name] = greedy(reference(base) if own is None else merged(base, own), list(prompt), num)
    return found


def prompt_of(seed: int, num: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(1, 60, (num,), generator=generator).tolist())


@pytest.mark.usefixtures("few_steps")
def test_a_slot_gets_another_adapter_while_the_base_streams(tmp_path: Path) -> None:
    """The first is unloaded, and its row of the tables is the second's: in steps that were recorded before either."""
    base = prepared(tmp_path)
    owners = {"base": None, "first": "all", "second": "keys"}
    asked: Asked = {name: (prompt_of(i, 5 + i), own) for i, (name, own) in enumerate(owners.items())}
    with pretend() as gpu:
        engine = engine_of(base, **FEW, max_adapters=1)
        captures, found = gpu.captures, dict[str, list[int]]()
        assert engine.adapters is not None

        def step() -> set[str]:
            events = engine.step()
            assert not events.failed
            for event in events.sampled:
                found.setdefault(event.request_id, []).extend(event.token_ids)
            return {event.request_id for event in events.sampled if event.finish is not None}

        first = load(engine, "all")
        engine.add(asking("base", asked["base"][0], num=9))
        engine.add(asking("first", asked["first"][0], first))
        while "first" not in step():
            pass
        engine.adapters.drop(first.digest)
        engine.add(asking("second", asked["second"][0], load(engine, "keys")))
        waits, ended = len(gpu.memory.waits), set[str]()
        while engine.has_work:
            ended |= step()
        assert ended == {"base", "second"} and gpu.captures == captures
        assert not [one for one in gpu.memory.waits[waits:] if "device" in one], "a step waits for a copy"
        assert (engine.adapters.num_loads, engine.adapters.num_evictions) == (2, 1)
    numbers = {"base": 9, "first": NUM, "second": NUM}
    assert found == {name: wanted(base, {name: one}, numbers[name])[name] for name, one in asked.items()}


@pytest.mark.long
@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_eight_adapters_and_the_base_in_one_batch_equal_merged_weights(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in chunks beside decoding rows, all steps recorded, and again through what is cached."""
    base = prepared(tmp_path, architecture)
    plain = list[object]()
    monkeypatch.setattr(Runner, "_compute", lambda self, plan, images: plain.append(plan))
    names = [None, *ADAPTERS, None]
    asked: Asked = {f"{i}": (prompt_of(i, 9 + i % 3), name) for i, name in enumerate(names)}
    with pretend() as gpu:
        engine = engine_of(base, max_num_seqs=10, max_num_batched_tokens=48, kv_cache_tokens=512)
        refs = {name: load(engine, name) for name in ADAPTERS}
        requests = [asking(name, prompt, refs[own] if own else None) for name, (prompt, own) in asked.items()]
        found = run(engine, *requests)
        launched = gpu.launches.copy()
        again = run(engine, *requests)
        assert engine.scheduler.cache.stats.hit_tokens > 0
        assert not plain and not {"shrink_kernel", "attention_split_kernel"} & set(gpu.launches - launched)
    assert found == wanted(base, asked) == again


FORMS: dict[str, dict[str, Any]] = {
    "look-up": LOOK_UP,
    "W8A16": W8A16,
    "batch-invariant": INVARIANT,
    "not recorded": {},
}


@pytest.mark.long
@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize("form", FORMS)
def test_adapters_beside_rounded_weights_drafts_and_what_is_not_recorded(form: str, tmp_path: Path) -> None:
    """Steps with drafts are recorded for rows with adapters, too; those that score prompts are not."""
    base = prepared(tmp_path)
    checkpoint(base, SHAPES["llama"])  # to round its weights changes nothing
    asked: Asked = {"a": ((9, 8) * 4, "all"), "b": ((9, 8) * 4, None), "c": ((7,) * 6, "some")}
    with pretend() as gpu:
        engine = engine_of(base, **FEW, **FORMS[form])
        refs = {name: load(engine, name) for name in ("all", "some")}
        requests = [asking(name, prompt, refs[own] if own else None, 7) for name, (prompt, own) in asked.items()]
        if form == "not recorded":
            requests = [dataclasses.replace(one, params=scoring(one.params)) for one in requests]
        launches = gpu.launches.copy()
        found = run(engine, *requests)
        assert ("shrink_kernel" in gpu.launches - launches) is (form == "not recorded")
        assert form != "look-up" or engine.scheduler.draft_stats.num_drafted > 0
    assert found == wanted(base, asked, 7)


def scoring(params: SamplingParams) -> SamplingParams:
    return dataclasses.replace(params, prompt_logprobs=1)


@pytest.mark.long
@pytest.mark.usefixtures("few_steps")
def test_preempted_rows_go_on_with_their_adapters(tmp_path: Path) -> None:
    base = prepared(tmp_path)
    asked: Asked = {f"{i}": (prompt_of(i, 6), name) for i, name in enumerate(("all", None, "some"))}
    with pretend():
        engine = engine_of(base, **FEW, kv_cache_tokens=40, admission_watermark=-3.0)
        refs = {name: load(engine, name) for name in ("all", "some")}
        requests = [asking(name, prompt, refs[own] if own else None, 20) for name, (prompt, own) in asked.items()]
        found = run(engine, *requests)
        assert engine.scheduler.num_preemptions > 0
    assert found == wanted(base, asked, 20)


@pytest.mark.long
@pytest.mark.usefixtures("few_steps")
def test_one_slot_serves_adapters_in_turn_while_the_base_streams(tmp_path: Path) -> None:
    """Each is copied there in its turn, or read again first, as host memory holds one of them and a little; no copy
    makes a step wait."""
    base = prepared(tmp_path)
    names = ["all", "some", "all", "stabilised"]
    asked: Asked = {f"{i}": (prompt_of(i, 5), own) for i, own in enumerate([*names, None])}
    with pretend() as gpu:
        engine = engine_of(base, **FEW, max_adapters=1, adapter_turn_s=0.0, adapter_host_bytes=100_000)
        refs = {name: load(engine, name) for name in set(names)}
        requests = [asking(name, prompt, refs[own] if own else None, 12) for name, (prompt, own) in asked.items()]
        waits = len(gpu.memory.waits)
        found = run(engine, *requests)
        assert not [one for one in gpu.memory.waits[waits:] if "device" in one or "host" in one]
        assert engine.adapters is not None and engine.adapters.num_loads >= 3 and engine.adapters.num_evictions >= 2
        assert engine.adapters.loader.num_reads > len(refs)
    assert found == wanted(base, asked, 12)


@pytest.mark.long
@pytest.mark.usefixtures("few_steps")
def test_a_step_of_the_base_alone_is_recorded_as_without_adapters(tmp_path: Path) -> None:
    """The same launches, and none of adapters' kernels."""
    base = prepared(tmp_path)

    def replayed(changes: Mapping[str, Any]) -> list[int]:
        with pretend() as gpu:
            engine = build(base, **changes) if not changes else engine_of(base, **changes)
            sizes = list[int]()
            replay = gpu.replay
            gpu.replay = lambda calls: sizes.append(len(calls)) or replay(calls)  # type: ignore[func-returns-value,method-assign]
            run(engine, asking("a", prompt_of(1, 9)))
            return sizes

    assert replayed({}) == replayed({"max_adapters": 2})


def test_more_slots_than_one_program_lays_out_are_refused(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", SHAPES["llama"])
    with pretend(), pytest.raises(ServiceError, match="256 on a GPU: at most 255"):
        engine_of(base, max_adapters=256)
