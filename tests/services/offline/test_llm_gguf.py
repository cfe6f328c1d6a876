"""`LLM` on GGUF files of the embedded model: the same answers, and the formats that a file may be computed in."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice_server import demo
from sluice_server.services.checkpoint import digests
from sluice_server.services.offline import LLM, SamplingParams
from tests.oracle.gguf_files import of_tokenizer, write_gguf

TARGET = Path(demo.__file__).parent / "target"
PROMPTS = ["def mean(values):", "import os", "class Stack:"]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
OPTIONS = {"threads": 1, "max_num_seqs": 4, "dtype": "float32"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    digests.remembered.cache_clear()
    yield
    digests.remembered.cache_clear()


def converted(directory: Path, kind: str) -> Path:
    vocabulary = of_tokenizer(
        TARGET / "tokenizer.json", 0, "gpt-2", bos_token_id=0, eos_token_id=0, add_bos_token=False
    )
    return write_gguf(TARGET, directory / f"demo-{kind}.gguf", kind, vocabulary)


def answers(model: str, **options: object) -> list[str]:
    with LLM(model, **{**OPTIONS, **options}) as llm:
        return [one.outputs[0].text for one in llm.generate(PROMPTS, GREEDY)]


def test_a_file_answers_as_the_checkpoint_does(tmp_path: Path) -> None:
    assert answers(str(converted(tmp_path, "F32"))) == answers("demo")


def test_a_quantised_file_is_computed_and_the_rest_of_it_may_be_rounded(tmp_path: Path) -> None:
    exact = answers("demo")
    for kind, options in (("Q8_0", {}), ("Q8_0", {"quantization": "int8"}), ("F32", {"quantization": "int8"})):
        found = answers(str(converted(tmp_path, kind)), **options)
        assert sum(one[:8] == other[:8] for one, other in zip(found, exact, strict=True)) >= 2, (kind, options)
