"""Classes and rankings through real processes equal those of `transformers`, with its tokenizer's pairs."""

import json
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
import transformers
from sluice.v1 import inference_pb2
from tokenizers import processors
from typer.testing import CliRunner

from sluice_server.services.cli.main import app
from tests.engine.models.test_word_labels import WORDS, make_reranker
from tests.engine.test_classes import make
from tests.oracle.encoders import make_encoder
from tests.oracle.tokenizers import byte_level_bpe
from tests.services.offline.test_llm_encoders import encoded, word_piece
from tests.system.service import generate, serve, spec

QUERY = "what does the fox do"
DOCUMENTS = ["the quick brown fox jumps over the lazy dog", "def f(x):", "hello world", "fox", "naïve café über straße"]


def test_a_ranking_is_that_of_transformers(tmp_path: Path) -> None:
    model = make(tmp_path, "qwen3", 1, vocab=404)
    tokenizer = byte_level_bpe(tmp_path)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    load: Any = transformers.PreTrainedTokenizerFast
    theirs = load(tokenizer_file=str(tmp_path / "tokenizer.json"))
    with torch.inference_mode():
        encoded = [theirs(QUERY, text, return_tensors="pt") for text in DOCUMENTS]
        scores = [model(one["input_ids"]).logits.sigmoid().item() for one in encoded]
        alone = model(theirs(QUERY, return_tensors="pt")["input_ids"]).logits.sigmoid().item()
    with serve("--model", str(tmp_path), "--dtype", "float32") as service, service.stub() as stub:
        found = stub.Rerank(inference_pb2.RerankRequest(query=QUERY, documents=DOCUMENTS))
        assert [one.index for one in found.results] == sorted(range(5), key=lambda at: -scores[at])
        assert [one.score for one in found.results] == pytest.approx(sorted(scores, reverse=True), abs=1e-4)
        assert found.usage.prompt_tokens == sum(one["input_ids"].shape[1] for one in encoded)
        told = stub.Classify(inference_pb2.ClassifyRequest(inputs=[inference_pb2.EmbedInput(text=QUERY)]))
        assert list(told.results[0].scores) == pytest.approx([alone], abs=1e-4)
        check_commands(service.address, found, alone)


def check_commands(address: str, ranking: inference_pb2.RerankResponse, alone: float) -> None:
    """The commands print what the calls answer."""

    def printed(*arguments: str) -> list[dict[str, Any]]:
        ran = CliRunner().invoke(app, [*arguments, "--address", address])
        assert ran.exit_code == 0, ran.output
        return [json.loads(line) for line in ran.stdout.splitlines()]

    best = printed("rerank", QUERY, *DOCUMENTS, "--top-n", "2")
    assert [one["index"] for one in best] == [one.index for one in ranking.results[:2]]
    assert [one["document"] for one in best] == [DOCUMENTS[one.index] for one in ranking.results[:2]]
    assert [one["score"] for one in best] == pytest.approx([one.score for one in ranking.results[:2]], abs=1e-4)
    [found] = printed("classify", QUERY)
    [scored] = found["scores"]
    assert found["label"] == scored["label"] and scored["score"] == pytest.approx(alone, abs=1e-4)


@pytest.mark.long
def test_an_encoder_ranks_and_generates_nothing(tmp_path: Path) -> None:
    size = word_piece(tmp_path)
    oracle = make_encoder(tmp_path, "Bert", "ForSequenceClassification", vocab_size=size, num_labels=1)
    scores = [oracle.classes(*encoded(oracle, QUERY, text)).sigmoid().item() for text in DOCUMENTS]
    with serve("--model", str(tmp_path), "--dtype", "float32") as service, service.stub() as stub:
        found = stub.Rerank(inference_pb2.RerankRequest(query=QUERY, documents=DOCUMENTS))
        assert [one.index for one in found.results] == sorted(range(5), key=lambda at: -scores[at])
        assert [one.score for one in found.results] == pytest.approx(sorted(scores, reverse=True), abs=1e-5)
        with pytest.raises(grpc.RpcError) as refused:
            generate(stub, spec(QUERY, 4))
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.long
def test_a_ranking_by_a_word_is_that_of_both_logits(tmp_path: Path) -> None:
    model = make_reranker(tmp_path, tied=True, vocab=404)
    tokenizer = byte_level_bpe(tmp_path)
    source = "{% for one in messages %}<s>{{ one.role }}: {{ one.content }}{% endfor %}{{ '</s>' }}"
    (tmp_path / "chat_template.jinja").write_text(source)
    scores = []
    for text in DOCUMENTS:
        ids = tokenizer.encode(f"<s>query: {QUERY}<s>document: {text}</s>", add_special_tokens=False).ids
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1]
        scores.append(torch.softmax(logits[list(WORDS)], 0)[0].item())
    with serve("--model", str(tmp_path), "--dtype", "float32") as service, service.stub() as stub:
        found = stub.Rerank(inference_pb2.RerankRequest(query=QUERY, documents=DOCUMENTS))
        assert [one.index for one in found.results] == sorted(range(5), key=lambda at: -scores[at])
        assert [one.score for one in found.results] == pytest.approx(sorted(scores, reverse=True), abs=1e-4)
        pairs = [inference_pb2.TextPair(first=QUERY, second=text) for text in DOCUMENTS]
        assert list(stub.Score(inference_pb2.ScoreRequest(pairs=pairs)).scores) == pytest.approx(scores, abs=1e-4)
        assert len(generate(stub, spec(QUERY, 4)).tokens) == 4
