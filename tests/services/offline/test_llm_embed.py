"""`LLM.embed` on the embedded model, through every stage: transformers' vectors, order, errors before any work."""

from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest
import torch
import transformers

from sluice_server.services.offline import LLM, EmbeddingOutput, PromptError, ServiceError
from tests.services.offline.test_llm import is_idle

PROMPTS = ["def mean(values):", "import os", "class Stack:", "# reads a file\n" * 30]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", threads=1, max_num_seqs=4, dtype="float32", max_num_batched_tokens=64) as made:
        yield made


@pytest.fixture(scope="module")
def states(llm: LLM) -> list[torch.Tensor]:
    """The oracle's hidden states of every prompt."""
    directory = Path(str(resources.files("sluice_server.demo"))) / "target"
    model = transformers.AutoModel.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        return [model(torch.tensor([llm.tokenize(text)])).last_hidden_state[0] for text in PROMPTS]


def vectors(found: list[EmbeddingOutput]) -> torch.Tensor:
    return torch.tensor([one.embedding for one in found])


def test_vectors_are_the_models_own_in_the_order_of_the_prompts(llm: LLM, states: list[torch.Tensor]) -> None:
    last = vectors(llm.embed(PROMPTS))
    want = torch.nn.functional.normalize(torch.stack([one[-1] for one in states]))
    assert torch.cosine_similarity(last, want).min() >= 0.99999
    assert last.norm(dim=1).tolist() == pytest.approx([1.0] * len(PROMPTS), abs=1e-5)
    mean = vectors(llm.embed(PROMPTS[::-1], pooling="mean", normalize=False))
    assert torch.allclose(mean, torch.stack([one.mean(0) for one in states[::-1]]), atol=2e-3)
    assert is_idle(llm)


def test_what_is_kept_of_a_vector_is_scaled(llm: LLM, states: list[torch.Tensor]) -> None:
    (found,) = llm.embed(PROMPTS[0], dimensions=7)
    want = torch.nn.functional.normalize(states[0][-1][:7], dim=0)
    assert found.embedding == pytest.approx(want.tolist(), abs=1e-4) and found.num_tokens == len(states[0])


def test_ids_and_more_prompts_than_run_at_once(llm: LLM) -> None:
    ids = [llm.tokenize(text) for text in PROMPTS] * 30
    assert torch.allclose(vectors(llm.embed(ids)), vectors(llm.embed(PROMPTS * 30)), atol=1e-5)
    assert is_idle(llm)


def test_an_instruction_is_put_before_every_text(llm: LLM) -> None:
    one, other = llm.embed(["a b", "c"], instruction="x = ")
    assert torch.allclose(vectors([one, other]), vectors(llm.embed(["x = a b", "x = c"])), atol=1e-5)


def test_a_prompt_that_is_too_long_is_refused_or_cut(llm: LLM) -> None:
    text = "a b c d e f\n" * 1000
    ids = llm.tokenize(text)
    with pytest.raises(PromptError, match=r"has .* tokens; this model allows 2048") as refused:
        llm.embed(["fine", text])
    assert refused.value.index == 1 and refused.value.reason == "CONTEXT_LENGTH_EXCEEDED"
    for truncate, kept in (("left", ids[-2048:]), ("right", ids[:2048])):
        (cut,) = llm.embed(text, truncate=truncate)
        assert cut.num_tokens == 2048
        (same,) = llm.embed([kept])
        assert cut.embedding == pytest.approx(same.embedding, abs=1e-5)
    assert is_idle(llm)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"dimensions": 0}, r"dimensions: 0 is not in \[1, 256\]"),
        ({"dimensions": 257}, r"dimensions: 257 is not in \[1, 256\]"),
        ({"pooling": "cls"}, "'cls' is none of first, last, mean"),
        ({"truncate": "middle"}, "'middle' is none of left, none, right"),
        ({"instruction": "x" * 8193}, "has 8193 bytes; at most 8192"),
    ],
)
def test_an_option_out_of_range_is_named(llm: LLM, options: dict[str, object], told: str) -> None:
    with pytest.raises(ServiceError, match=told):
        llm.embed("a", **options)
    assert is_idle(llm)
