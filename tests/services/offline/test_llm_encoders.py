"""`LLM` on tiny random encoders, through every stage: WordPiece with token types, Unigram with two separators."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from sluice_server import LLM
from sluice_server.services.offline import PromptError, ServiceError
from tests.oracle.encoders import FAMILIES, RandomEncoder, make_encoder
from tests.oracle.tokenizers import TEXT
from tests.services.offline.test_llm import is_idle

QUERY = "What does the Fox do"
DOCUMENTS = ["the quick brown fox jumps over the lazy dog", "def f(x):", "hello world", "naïve café"]
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
POOLING = {"word_embedding_dimension": 48, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
MODULES = [
    {"idx": num, "name": str(num), "path": path, "type": f"sentence_transformers.models.{kind}"}
    for num, (path, kind) in enumerate([("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")])
]


def word_piece(directory: Path) -> int:
    """Writes BERT's tokenizer and returns its size."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer.train_from_iterator(
        TEXT, trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.enable_truncation(16)  # published files have these; they are for training
    tokenizer.enable_padding(length=32)
    return saved(tokenizer, directory)


def unigram(directory: Path) -> int:
    """Writes XLM-RoBERTa's tokenizer and returns its size."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return saved(tokenizer, directory)


def saved(tokenizer: Tokenizer, directory: Path) -> int:
    tokenizer.save(str(directory / "tokenizer.json"))
    size: int = tokenizer.get_vocab_size()
    return size


WRITERS = {"Bert": word_piece, "XLMRoberta": unigram, "ModernBert": word_piece}
assert WRITERS.keys() <= FAMILIES.keys()


@pytest.fixture(params=WRITERS)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def states(oracle: RandomEncoder, *texts: str) -> torch.Tensor:
    """The oracle's hidden states of a text, or of a pair, encoded by its own tokenizer."""
    ids, num_first = encoded(oracle, *texts)
    return oracle.states(ids, num_first)


def encoded(
    oracle: RandomEncoder,
    *texts: str,
    truncation_side: str = "right",
    **options: Any,  # noqa: ANN401 # of the call
) -> tuple[list[int], int | None]:
    path = str(oracle.directory / "tokenizer.json")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=path)  # type: ignore[no-untyped-call] # theirs
    tokenizer.truncation_side = truncation_side
    found = tokenizer(*texts, **{"truncation": False, **options}, return_token_type_ids=True)
    ids: list[int] = found["input_ids"]
    return ids, found["token_type_ids"].count(0) if len(texts) > 1 else None


@pytest.fixture
def embedder(tmp_path: Path, family: str) -> Iterator[tuple[LLM, RandomEncoder]]:
    size = WRITERS[family](tmp_path)
    oracle = make_encoder(tmp_path, family, vocab_size=size)
    (tmp_path / "modules.json").write_text(json.dumps(MODULES))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(POOLING))
    with LLM(tmp_path, threads=1, dtype="float32", max_num_batched_tokens=24) as llm:
        yield llm, oracle


def test_vectors_are_those_of_sentence_transformers(embedder: tuple[LLM, RandomEncoder]) -> None:
    llm, oracle = embedder
    texts = [*DOCUMENTS, QUERY]
    found = torch.tensor([one.embedding for one in llm.embed(texts)])
    want = torch.nn.functional.normalize(torch.stack([states(oracle, text)[0] for text in texts]))
    assert torch.allclose(found, want, atol=1e-5)
    mean = torch.tensor([one.embedding for one in llm.embed(texts, pooling="mean", normalize=False)])
    assert torch.allclose(mean, torch.stack([states(oracle, text).mean(0) for text in texts]), atol=1e-4)
    assert is_idle(llm)


def test_long_inputs_are_refused_or_cut_and_nothing_is_generated(embedder: tuple[LLM, RandomEncoder]) -> None:
    llm, oracle = embedder
    text = "the quick brown fox " * 40
    with pytest.raises(PromptError, match=r"inputs\[1\] has .* tokens; this model allows 6[46]"):
        llm.embed(["short", text])
    (cut,) = llm.embed(text, truncate="right")
    ids, _ = encoded(oracle, text)
    kept = [*ids[: cut.num_tokens - 1], ids[-1]]
    assert cut.num_tokens == (64 if isinstance(oracle.model, transformers.XLMRobertaModel) else 66)
    want = torch.nn.functional.normalize(oracle.states(kept)[0], dim=0)
    assert torch.allclose(torch.tensor(cut.embedding), want, atol=1e-5)
    with pytest.raises(ServiceError, match="Generate is not supported with this model, which has no head"):
        llm.generate("a")
    with pytest.raises(ServiceError, match="Rerank is not supported with this model, which has no classification head"):
        llm.rerank(QUERY, DOCUMENTS)
    assert is_idle(llm)


@pytest.fixture
def ranker(tmp_path: Path, family: str) -> Iterator[tuple[LLM, RandomEncoder]]:
    size = WRITERS[family](tmp_path)
    oracle = make_encoder(tmp_path, family, "ForSequenceClassification", vocab_size=size, num_labels=1)
    with LLM(tmp_path, threads=1, dtype="float32", max_num_batched_tokens=24) as llm:
        yield llm, oracle


def test_rankings_are_those_of_a_cross_encoder(ranker: tuple[LLM, RandomEncoder]) -> None:
    llm, oracle = ranker
    numbers = [oracle.classes(*encoded(oracle, QUERY, text)).sigmoid().item() for text in DOCUMENTS]
    assert llm.score([(QUERY, text) for text in DOCUMENTS]) == pytest.approx(numbers, abs=1e-5)
    order = sorted(range(len(numbers)), key=lambda at: -numbers[at])
    assert [one.index for one in llm.rerank(QUERY, DOCUMENTS)] == order
    (alone,) = llm.classify(QUERY)
    assert alone.scores == pytest.approx([oracle.classes(*encoded(oracle, QUERY)).sigmoid().item()], abs=1e-5)
    long = "the quick brown fox " * 40
    with pytest.raises(PromptError, match=r"documents\[0\] has .* tokens; this model allows 6"):
        llm.rerank(QUERY, [long])
    most = 64 if isinstance(oracle.model, transformers.XLMRobertaForSequenceClassification) else 66
    for side in ("left", "right"):
        for pair in ((QUERY, long), (long, QUERY), (long, long)):
            cut = encoded(oracle, *pair, max_length=most, truncation=True, truncation_side=side)
            assert len(cut[0]) == most
            want = oracle.classes(*cut).sigmoid().item()
            assert llm.score([pair], truncate=side) == pytest.approx([want], abs=1e-5)
            assert llm.rerank(*pair[:1], [pair[1]], truncate=side)[0].score == pytest.approx(want, abs=1e-5)
    assert is_idle(llm)


@pytest.mark.parametrize(
    "field",
    [
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
        {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
    ],
)
def test_a_cross_encoder_may_score_without_an_activation(tmp_path: Path, field: dict[str, object]) -> None:
    size = word_piece(tmp_path)
    oracle = make_encoder(tmp_path, "Bert", "ForSequenceClassification", vocab_size=size, num_labels=1)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **field}))
    with LLM(tmp_path, threads=1, dtype="float32") as llm:
        want = oracle.classes(*encoded(oracle, QUERY, DOCUMENTS[0])).item()
        assert llm.score([(QUERY, DOCUMENTS[0])]) == pytest.approx([want], abs=1e-5)
