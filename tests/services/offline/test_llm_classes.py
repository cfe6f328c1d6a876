"""`LLM.classify`, `rerank` and `score` on tiny random classifiers, through every stage: the numbers of transformers."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
import transformers

from sluice_server import LLM
from sluice_server.services.gateway.settings import GatewaySettings
from sluice_server.services.offline import PromptError, RankedOutput, ServiceError
from tests.engine.test_classes import make
from tests.oracle.tokenizers import byte_level_bpe
from tests.services.offline.test_llm import is_idle

QUERY = "what does the fox do"
DOCUMENTS = ["the quick brown fox jumps over the lazy dog", "def f(x):", "hello world", "naïve café über straße"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("classifier")


@pytest.fixture(scope="module")
def oracle(folder: Path) -> "transformers.PreTrainedModel":
    byte_level_bpe(folder)
    return make(folder, "qwen3", 1, vocab=404)


@pytest.fixture(scope="module")
def llm(folder: Path, oracle: "transformers.PreTrainedModel") -> Iterator[LLM]:
    with LLM(folder, threads=1, max_num_seqs=4, dtype="float32", max_num_batched_tokens=64) as made:
        yield made


def score(llm: LLM, oracle: "transformers.PreTrainedModel", *texts: str) -> float:
    ids = [one for text in texts for one in llm.tokenize(text)]
    with torch.inference_mode():
        value: float = oracle(torch.tensor([ids])).logits.sigmoid().item()
    return value


def test_scores_and_rankings_are_the_models_own(llm: LLM, oracle: "transformers.PreTrainedModel") -> None:
    want = [score(llm, oracle, QUERY, text) for text in DOCUMENTS]
    pairs = [(QUERY, text) for text in DOCUMENTS]
    assert llm.score(pairs) == pytest.approx(want, abs=1e-4)
    order = sorted(range(len(want)), key=lambda at: -want[at])
    found = llm.rerank(QUERY, DOCUMENTS)
    assert [one.index for one in found] == order
    assert [one.score for one in found] == pytest.approx([want[at] for at in order], abs=1e-4)
    assert llm.rerank(QUERY, DOCUMENTS, top_n=2) == found[:2] and isinstance(found[0], RankedOutput)
    assert is_idle(llm)


def test_classes_are_the_models_own(llm: LLM, oracle: "transformers.PreTrainedModel") -> None:
    prompts: list[str | Sequence[int]] = [*DOCUMENTS, llm.tokenize(QUERY)]
    found = llm.classify(prompts)
    want = [score(llm, oracle, text) for text in (*DOCUMENTS, QUERY)]
    assert [one.scores for one in found] == [pytest.approx([one], abs=1e-4) for one in want]
    assert {one.label for one in found} == {"LABEL_0"} and found[-1].num_tokens == len(llm.tokenize(QUERY))
    (cut,) = llm.classify("a b c d e f\n" * 300, truncate="right")
    assert cut.num_tokens == 256


def test_more_pairs_than_a_request_holds(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [("a", text) for text in DOCUMENTS]
    whole, ranked = llm.score(pairs), llm.rerank("a", DOCUMENTS, top_n=3)
    monkeypatch.setattr(GatewaySettings, "max_embed_inputs", 3)
    assert llm.score(pairs) == pytest.approx(whole) and llm.score([]) == []
    assert [one.index for one in llm.rerank("a", DOCUMENTS, top_n=3)] == [one.index for one in ranked]


def test_what_is_wrong_is_named(llm: LLM) -> None:
    with pytest.raises(PromptError, match=r"pairs\[1\].second: is empty") as refused:
        llm.score([("a", "b"), ("a", "")])
    assert refused.value.index == 1
    with pytest.raises(PromptError, match=r"documents\[0\] has .* tokens; this model allows 256"):
        llm.rerank(QUERY, ["a b c d e f\n" * 300])
    with pytest.raises(PromptError, match="documents: is empty"):
        llm.rerank(QUERY, [])
    with pytest.raises(TypeError, match="documents is one text"):
        llm.rerank(QUERY, "documents")
    with pytest.raises(ServiceError, match="'middle' is none of left, none, right"):
        llm.classify("a", truncate="middle")
    assert is_idle(llm)
