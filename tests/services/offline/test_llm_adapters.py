"""`LLM` with adapters: each prompt of a batch with its own, read when it is named, refused before any work."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice_server.engine.models.config import read_config
from sluice_server.services.checkpoint.model_source import resolve_model
from sluice_server.services.offline import LLM, PromptError, SamplingParams
from tests.oracle.adapters import write_adapter

PROMPT = "def mean(values):"
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
NAMES = ("first", "second")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = resolve_model("demo", "").path
    found = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(NAMES):
        write_adapter(found / name, read_config(directory), seed=seed, rank=4, lora_alpha=64)
    return found


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with LLM("demo", threads=1, adapter_dir=folder, max_adapters=2, kv_cache_tokens=4096) as made:
        yield made


def test_each_prompt_of_a_batch_has_its_adapter(llm: LLM) -> None:
    found = llm.generate([PROMPT] * 3, GREEDY, adapter=["first", None, "second"])
    texts = [one.outputs[0].text for one in found]
    assert len(set(texts)) == 3
    for text, name in zip(texts, ("first", None, "second"), strict=True):
        assert llm.generate(PROMPT, GREEDY, adapter=name)[0].outputs[0].text == text
    assert "".join(llm.stream(PROMPT, GREEDY, adapter="second")) == texts[2]


def test_a_chat_has_its_adapter(llm: LLM) -> None:
    chat = [{"role": "user", "content": "add two numbers"}]
    base, own = (llm.chat(chat, GREEDY, adapter=name)[0].outputs[0].text for name in (None, "first"))
    assert base != own


def test_what_cannot_be_named_fails_before_anything_is_computed(llm: LLM, folder: Path) -> None:
    with pytest.raises(PromptError, match="nowhere") as error:
        llm.generate([PROMPT] * 3, GREEDY, adapter=["first", "nowhere", "first"])
    assert (error.value.index, error.value.error.reason) == (1, "ADAPTER_NOT_FOUND")
    assert llm._open().engine.split.compute_s == 0.0
    with pytest.raises(ValueError, match="1 adapters for 2 prompts"):
        llm.generate([PROMPT] * 2, GREEDY, adapter=["first"])
    (folder / "broken").mkdir()
    (folder / "broken" / "adapter_config.json").write_text("{}")
    with pytest.raises(PromptError, match="peft_type"):
        llm.generate(PROMPT, GREEDY, adapter="broken")
    assert llm.generate(PROMPT, GREEDY, adapter="first")


@pytest.mark.long
def test_more_adapters_than_may_be_loaded_at_once(folder: Path) -> None:
    """A batch may name a hundred: each is waited for before the next one is asked for."""
    params = dataclasses.replace(GREEDY, max_tokens=1)
    names = [f"link-{index}" for index in range(70)]
    for name in names:
        if not (folder / name).exists():
            (folder / name).symlink_to(folder / "first")
    with LLM("demo", threads=1, adapter_dir=folder, max_adapters=1, kv_cache_tokens=4096) as llm:
        assert len(llm.generate([PROMPT] * 70, params, adapter=names)) == 70


def test_one_without_adapters_refuses_them() -> None:
    with (
        LLM("demo", threads=1, kv_cache_tokens=1024) as llm,
        pytest.raises(PromptError, match="not started with --max-adapters"),
    ):
        llm.generate(PROMPT, GREEDY, adapter="first")
