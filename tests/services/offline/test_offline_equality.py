"""Tokens and text of `LLM` in one process equal those through gRPC and the real processes, for every option."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sluice.v1 import inference_pb2, types_pb2

from sluice_server.services.offline import LLM, CompletionOutput, RequestOutput
from tests.oracle.checkpoints import Shape, make_checkpoint
from tests.oracle.tokenizers import byte_level_bpe
from tests.system.service import Service, serve

# Opens the reasoning where it is asked to, and shows the tools.
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{{ documents | tojson if documents else '' }}"
    "{{ tools | tojson if tools else '' }}<tool_call>{{ '<think>' if thinking else '</think>' }}"
)
TEXT = "def mean(values):"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TOOL = {"name": "weather", "description": "It tells.", "parameters": {"type": "object", "additionalProperties": False}}
Asked = tuple[dict[str, Any], dict[str, Any]]  # here, and as the contract has it

# Parameters, and the spec that asks for the same; all are sampled at 0.9 but where they say otherwise.
BATCH: dict[str, Asked] = {
    "seed": ({"seed": 11}, {"sampling": {"seed": 11}}),
    "greedy": ({"temperature": 0.0}, {"sampling": {"temperature": 0.0}}),
    "truncation": (
        {"seed": 1, "top_k": 40, "top_p": 0.8, "min_p": 0.01, "typical_p": 0.95},
        {"sampling": {"seed": 1, "top_k": 40, "top_p": 0.8, "min_p": 0.01, "typical_p": 0.95}},
    ),
    "penalties": (
        {"seed": 2, "presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.2, "min_tokens": 3},
        {
            "sampling": {
                "seed": 2,
                "presence_penalty": 0.5,
                "frequency_penalty": 0.2,
                "repetition_penalty": 1.2,
                "min_tokens": 3,
            }
        },
    ),
    "biases": (
        {"seed": 3, "logit_bias": {70: 9.0, 71: 8.5}, "bad_token_ids": [71], "bad_words": ["ab", "e"]},
        {"sampling": {"seed": 3, "logit_bias": {70: 9.0, 71: 8.5}, "bad_token_ids": [71], "bad_words": ["ab", "e"]}},
    ),
    "allowed": (
        {"seed": 4, "allowed_token_ids": [60, 61, 62, 63], "stop_token_ids": [63]},
        {"sampling": {"seed": 4, "allowed_token_ids": [60, 61, 62, 63]}, "stop": {"token_ids": [63]}},
    ),
    "stop strings": (
        {"seed": 11, "stop": ["a", "e", "i", "o"], "include_stop": True},
        {"sampling": {"seed": 11}, "stop": {"strings": ["a", "e", "i", "o"], "include": True}},
    ),
    "two outputs, one of them stopped": (
        {"seed": 5, "n": 2, "stop": "t"},
        {"sampling": {"seed": 5, "n": 2}, "stop": {"strings": ["t"]}},
    ),
    "best of": ({"seed": 6, "n": 1, "best_of": 3}, {"sampling": {"seed": 6, "n": 1, "best_of": 3}}),
    "beams": (
        {"temperature": 0.0, "n": 2, "beam_width": 3, "length_penalty": 0.5},
        {"sampling": {"temperature": 0.0, "n": 2, "beam": {"width": 3, "length_penalty": 0.5}}},
    ),
    "log probabilities": (
        {"seed": 7, "logprobs": 2, "logprob_token_ids": [9], "prompt_logprobs": 1},
        {"sampling": {"seed": 7}, "output": {"logprobs": 2, "logprob_token_ids": [9], "prompt_logprobs": 1}},
    ),
    "schema": (
        {"seed": 8, "json_schema": SCHEMA},
        {"sampling": {"seed": 8}, "constraint": {"json_schema": json.dumps(SCHEMA)}},
    ),
    "any object": ({"seed": 8, "json_object": True}, {"sampling": {"seed": 8}, "constraint": {"json_object": {}}}),
    "regex": ({"seed": 9, "regex": "[ab]{3}"}, {"sampling": {"seed": 9}, "constraint": {"regex": "[ab]{3}"}}),
    "grammar": (
        {"seed": 9, "grammar": 'root ::= "x" | "y" root'},
        {"sampling": {"seed": 9}, "constraint": {"grammar": 'root ::= "x" | "y" root'}},
    ),
    "choices": (
        {"seed": 10, "choices": ["yes", "no"]},
        {"sampling": {"seed": 10}, "constraint": {"choice": {"texts": ["yes", "no"]}}},
    ),
    "the end of a prompt, uncached": (
        {"seed": 1, "truncate_prompt_tokens": 3, "bypass_cache": True, "priority": 5, "skip_special_tokens": False},
        {
            "sampling": {"seed": 1},
            "truncate_prompt_tokens": 3,
            "cache": {"bypass": True},
            "scheduling": {"priority": 5},
            "output": {"skip_special_tokens": False},
        },
    ),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path, Shape(vocab=400, context=1024))
    byte_level_bpe(path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def service(directory: Path) -> Iterator[Service]:
    with serve("--model", str(directory), "--dtype", "float32") as running:
        yield running


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    with LLM(str(directory), dtype="float32", threads=1) as made:
        yield made


def asked(name: str) -> Asked:
    """The arguments with those that all requests have."""
    params, fields = BATCH[name]
    common = {"temperature": 0.9, "max_tokens": 24, "seed": 0}
    return {**common, **params}, {**fields, "sampling": {**common, **fields.get("sampling", {})}}


def answers(service: Service, specs: list[types_pb2.GenerationSpec]) -> list[inference_pb2.GenerateResponse]:
    """The answers to all requests at once."""
    with service.stub() as stub, ThreadPoolExecutor(8) as pool:
        requests = [inference_pb2.GenerateRequest(spec=spec) for spec in specs]
        return list(pool.map(lambda request: stub.Generate(request, timeout=60), requests))


def same(here: RequestOutput, there: inference_pb2.GenerateResponse) -> None:
    """Checks everything that both answers have."""
    assert len(here.outputs) == len(there.outputs)
    for mine, output in zip(here.outputs, there.outputs, strict=True):
        assert mine.token_ids == [token.id for token in output.tokens]
        assert (mine.index, mine.text, mine.reasoning) == (output.index, output.text, output.reasoning)
        calls = [(one.name, one.arguments) for one in output.tool_calls]  # their ids are made of the request's
        assert [(one.name, one.arguments) for one in mine.tool_calls] == calls
        name = types_pb2.FinishReason.Name(output.finish_reason)
        assert name == f"FINISH_REASON_{mine.finish_reason.upper()}"
        same_stop(mine, output)
        same_logprobs(mine.logprobs, list(output.tokens))
    assert here.seed == there.params.sampling.seed
    assert len(here.prompt_token_ids) == there.usage.prompt_tokens
    if there.prompt_info.tokens:
        assert here.prompt_token_ids == [token.id for token in there.prompt_info.tokens]
        assert here.prompt_logprobs is not None and here.prompt_logprobs[0] is None
        same_logprobs(here.prompt_logprobs[1:], list(there.prompt_info.tokens)[1:])


def same_stop(mine: CompletionOutput, output: types_pb2.Output) -> None:
    """Checks the stop; an end of sequence is reported by the reason alone offline."""
    if mine.finish_reason == "stop_string":
        assert mine.stop_reason == output.stop_match.text
    else:
        assert mine.stop_reason == (output.stop_match.token_id if mine.finish_reason == "stop_token" else None)


def same_logprobs(mine: Any, tokens: list[types_pb2.Token]) -> None:  # noqa: ANN401 # of tokens or a prompt
    """Checks the log probabilities of each token, and of its alternatives."""
    if mine is None:
        assert not any(token.HasField("logprob") for token in tokens)
        return
    for found, token in zip(mine, tokens, strict=True):
        want = {one.id: (one.logprob, one.rank) for one in token.candidates} | {token.id: (token.logprob, token.rank)}
        assert {number: (one.logprob, one.rank) for number, one in found.items()} == want
        assert found[token.id].decoded_token == token.piece.decode(errors="replace")


def test_a_mixed_batch(llm: LLM, service: Service) -> None:
    both = [asked(name) for name in BATCH]
    here = llm.generate([TEXT] * len(both), [params for params, _ in both])
    there = answers(service, [types_pb2.GenerationSpec(text=TEXT, **fields) for _, fields in both])
    for name, mine, answer in zip(BATCH, here, there, strict=True):
        print(name)
        same(mine, answer)
    reasons = {output.finish_reason for one in here for output in one.outputs}
    assert reasons >= {"length", "eos", "stop_token", "stop_string"}, "the batch shows every end"


def test_token_ids_and_streams(llm: LLM, service: Service) -> None:
    params, fields = asked("seed")
    ids = llm.tokenize(TEXT)
    (there,) = answers(service, [types_pb2.GenerationSpec(token_ids=types_pb2.TokenIds(ids=ids), **fields)])
    same(llm.generate(ids, params)[0], there)
    assert "".join(llm.stream(ids, params)) == there.outputs[0].text
    with service.stub() as stub:
        parts = stub.Tokenize(inference_pb2.TokenizeRequest(text=TEXT), timeout=60)
        assert ids == [token.id for token in parts.tokens]


@pytest.mark.parametrize("variables", [{}, {"thinking": True}])
def test_chats_with_tools_and_reasoning(llm: LLM, service: Service, variables: dict[str, Any]) -> None:
    params, fields = asked("seed")
    params |= {"max_tokens": 100, "seed": 1}
    fields["sampling"] |= {"max_tokens": 100, "seed": 1}
    tool = {**TOOL, "parameters": json.dumps(TOOL["parameters"])}
    message = {"role": types_pb2.ROLE_USER, "parts": [{"text": "hello"}]}
    named: dict[str, Any] = {"messages": [message], "tools": [tool], "template_variables": json.dumps(variables)}
    must = {**named, "tool_choice": {"mode": types_pb2.TOOL_MODE_REQUIRED}}
    specs = [types_pb2.GenerationSpec(chat=types_pb2.Chat(**chat), **fields) for chat in (named, must)]
    free, called = answers(service, specs)
    given: dict[str, Any] = {"tools": [{"type": "function", "function": TOOL}], "chat_template_kwargs": variables}
    talk = [{"role": "user", "content": "hello"}]
    (mine,) = llm.chat(talk, params, **given)
    same(mine, free)
    assert mine.prompt is not None and mine.prompt.startswith("hello") and "weather" in mine.prompt
    assert bool(mine.outputs[0].reasoning) is bool(variables)
    (calling,) = llm.chat(talk, params, tool_choice="required", **given)
    same(calling, called)
    assert variables or ("weather", "{}") in [(one.name, one.arguments) for one in calling.outputs[0].tool_calls]
    assert [one.outputs for one in llm.chat([talk, talk], params, **given)] == [mine.outputs] * 2


def test_all_that_a_template_is_given(llm: LLM, service: Service) -> None:
    params, fields = asked("seed")
    hello = {"role": types_pb2.ROLE_USER, "parts": [{"text": "hello"}]}
    begun = {"role": types_pb2.ROLE_ASSISTANT, "parts": [{"text": "It is"}]}
    chats: list[dict[str, Any]] = [
        {"messages": [hello, begun], "continue_final_message": True},
        {"messages": [hello, begun], "documents": ['{"text": "é"}']},
    ]
    there = answers(service, [types_pb2.GenerationSpec(chat=types_pb2.Chat(**chat), **fields) for chat in chats])
    talk = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "It is"}]
    (continued,) = llm.chat(talk, params, continue_final_message=True)
    same(continued, there[0])
    assert continued.prompt == "helloIt is"
    same(llm.chat(talk, params, documents=[{"text": "é"}])[0], there[1])
    (own,) = llm.chat(talk, params, chat_template="{{ messages | length }}!")
    assert own.prompt == "2!"
