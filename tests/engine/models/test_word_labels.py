"""Rerankers that answer with one of two words, against the softmax over both logits in `transformers`."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.labels import Activation, LabelsConfig
from sluice_server.engine.request import EngineRequest, Pooling, SamplingParams
from tests.engine.test_classes import TINY
from tests.engine.test_engine_oracle import GEMMA2, ROOMY, make_engine, some_prompts
from tests.engine.test_pooling import vector
from tests.oracle.checkpoints import Shape, make_checkpoint

WORDS = (61, 7)  # yes and no
VOCAB = 97
TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"}
KIND = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"


def make_reranker(directory: Path, *, tied: bool, vocab: int = VOCAB) -> "transformers.PreTrainedModel":
    """Writes a random model in the form of Qwen3-Reranker and returns it."""
    config = transformers.Qwen3Config(
        vocab_size=vocab,
        **TINY,
        tie_word_embeddings=tied,
        pad_token_id=None,
    )
    torch.manual_seed(5)
    model = transformers.Qwen3ForCausalLM(config)
    model.train(False)
    model.save_pretrained(directory)
    score(directory, true_token_id=WORDS[0], false_token_id=WORDS[1])
    return model


def score(directory: Path, path: str = "1_LogitScore", **fields: object) -> None:
    """Writes sentence-transformers' files of such a model."""
    module = {"idx": 1, "name": "1", "path": path, "type": KIND}
    (directory / "modules.json").write_text(json.dumps([TRANSFORMER, module]))
    (directory / "1_LogitScore").mkdir(exist_ok=True)
    (directory / "1_LogitScore" / "config.json").write_text(json.dumps(fields))


@pytest.mark.parametrize("tied", [False, True])
def test_the_number_is_that_of_both_logits(tmp_path: Path, tied: bool) -> None:
    model = make_reranker(tmp_path, tied=tied)
    config = read_config(tmp_path)
    assert config.labels == LabelsConfig(("relevant",), Activation.SIGMOID, WORDS) and config.generates
    prompts = some_prompts(VOCAB, 5)
    engine = make_engine(tmp_path, ROOMY)
    for name, ids in prompts.items():
        engine.add(EngineRequest(name, tuple(ids), SamplingParams(), pooling=Pooling.CLASSES))
    found: dict[str, torch.Tensor] = {}
    while engine.has_work:
        found |= {one.request_id: vector(one) for one in engine.step().pooled}
    for name, ids in prompts.items():
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1]
        want = torch.softmax(logits[list(WORDS)], 0)[0].item()
        assert torch.sigmoid(found[name]).tolist() == pytest.approx([want], abs=1e-5)


def test_files_without_two_words_name_no_class(tmp_path: Path) -> None:
    make_reranker(tmp_path, tied=True)
    score(tmp_path, true_token_id=3, false_token_id=None)
    assert read_config(tmp_path).labels is None
    (tmp_path / "modules.json").write_text(json.dumps([TRANSFORMER]))
    assert read_config(tmp_path).labels is None


@pytest.mark.parametrize(
    ("path", "words", "told"),
    [
        ("1_LogitScore", (VOCAB, 1), "true_token_id is 97; it must be an id from 0 to 96, below vocab_size"),
        ("1_LogitScore", (1, "no"), "false_token_id is 'no'; it must be an id"),
        ("1_LogitScore", (True, 1), "true_token_id is True; it must be an id"),
        ("../elsewhere", (1, 2), "path is '../elsewhere'; it must be a folder beside the file"),
    ],
)
def test_a_file_that_is_wrong_is_named(tmp_path: Path, path: str, words: tuple[object, object], told: str) -> None:
    make_reranker(tmp_path, tied=True)
    score(tmp_path, path, true_token_id=words[0], false_token_id=words[1])
    with pytest.raises(ServiceError) as refused:
        read_config(tmp_path)
    assert refused.value.reason == "MODEL_INVALID" and told in refused.value.message, refused.value.message


def test_words_of_capped_logits_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, Shape("gemma2", tied=True, options=GEMMA2))
    score(tmp_path, true_token_id=1, false_token_id=2)
    with pytest.raises(ServiceError, match="Gemma2ForCausalLM caps its logits"):
        make_engine(tmp_path, ROOMY)
