"""Log probabilities of prompts and of chosen ids, and bad words, from the whole service."""

from collections.abc import Iterator

import pytest
from sluice.v1 import inference_pb2, inference_pb2_grpc, types_pb2

from tests.system.service import serve, spec

Stub = inference_pb2_grpc.InferenceServiceStub
TEXT = "import os\nimport sys\n\ndef main():\n    return os.path.join('a', 'b')\n"


@pytest.fixture(scope="module")
def stub() -> Iterator[Stub]:
    with serve() as service, service.stub() as stub:
        yield stub


def whole(stub: Stub, asked: types_pb2.GenerationSpec) -> inference_pb2.GenerateResponse:
    return stub.Generate(inference_pb2.GenerateRequest(spec=asked), timeout=60)


def test_a_prompt_is_told_with_its_log_probabilities_cached_or_not(stub: Stub) -> None:
    asked = spec(TEXT * 3, 3)
    whole(stub, asked)  # which leaves its prefix behind
    asked.output.prompt_logprobs = 2
    answer = whole(stub, asked)
    first, *rest = answer.prompt_info.tokens
    assert answer.usage.cached_tokens == 0 and len(rest) + 1 == answer.usage.prompt_tokens
    assert b"".join(token.piece for token in (first, *rest)).decode() == TEXT * 3
    assert not first.HasField("logprob") and not first.candidates
    for token in rest:
        assert token.logprob <= 0 and len(token.candidates) == 2 and token.rank >= 1
        assert (token.rank == 1) == (token.candidates[0].id == token.id)
    events = list(stub.StreamGenerate(inference_pb2.StreamGenerateRequest(spec=asked), timeout=60))
    assert events[1].prompt_info.tokens == answer.prompt_info.tokens and events[2].HasField("delta")
    assert answer.params.output.prompt_logprobs == 2
    again = spec(TEXT * 3, 3)
    assert whole(stub, again).usage.cached_tokens > 0


def test_a_long_prompts_log_probabilities_travel_too(stub: Stub) -> None:
    """They are larger than a frame of the ring."""
    asked = spec([7 + at % 300 for at in range(1500)], 1)
    asked.output.prompt_logprobs = 20
    answer = whole(stub, asked)
    assert [len(token.candidates) for token in answer.prompt_info.tokens] == [0] + [20] * 1499


def test_chosen_ids_are_reported_behind_the_best(stub: Stub) -> None:
    asked = spec(TEXT, 4)
    asked.output.logprobs = 2
    asked.output.logprob_token_ids.extend([5, 9])
    (output,) = whole(stub, asked).outputs
    for token in output.tokens:
        assert [one.id for one in token.candidates[2:]] == [5, 9] and len(token.candidates) == 4
        assert token.candidates[0].id == token.id and token.candidates[0].logprob == token.logprob
        assert all(one.rank > 2 and one.piece for one in token.candidates[2:] if one.id != token.candidates[1].id)


def test_words_that_may_not_be_said_are_not(stub: Stub) -> None:
    asked = spec(TEXT, 60, seed=1, temperature=0.5)
    said = whole(stub, asked).outputs[0].text
    words = sorted({word for word in said.split() if word.isalpha() and len(word) > 2})[:8]
    assert words
    asked.sampling.bad_words.extend(words)
    (output,) = whole(stub, asked).outputs
    assert not {word for word in output.text.split() if word in words} and output.text != said
