"""A chat through tokenizer, engine and detokenizer: the model's output becomes text, reasoning and calls."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import AddedToken, Tokenizer

from sluice_server.engine.engine import Engine
from sluice_server.engine.kv_cache.cache import KVCache
from sluice_server.engine.plan import StepResult
from sluice_server.engine.request import ENDED_BY_TEXT, FinishReason, Limits, SamplingParams
from sluice_server.engine.scheduler.scheduler import Scheduler
from sluice_server.services.detokenizer.stage import DetokenizerStage
from sluice_server.services.engine.membership import RingMembership
from sluice_server.services.engine.stage import EngineStage
from sluice_server.services.messages.messages import Envelope, Grant, Message, Submit, Text
from sluice_server.services.messages.processes import Report
from sluice_server.services.messages.work import ChatMessage, ChatPrompt, Generate, Stops, TextOptions, Tool
from sluice_server.services.tokenizer.encoding import TextEncoder
from sluice_server.services.tokenizer.stage import EncodingThreads, TokenizerStage
from tests.oracle.templates import TEMPLATES
from tests.oracle.tokenizers import byte_level_bpe
from tests.services.test_stage_attempts import Nines, unrecorded
from tests.services.tokenizer.constrain import idle_constraints

LIMITS = Limits(context_length=4096, vocab_size=500)
EOS = 1
TOOLS = (Tool("weather", "It tells.", '{"type": "object", "properties": {}}'),)
ASK = (ChatMessage("user", "weather?"),)


SPECIAL = ["<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"]
MISTRAL = "{{ messages[0].content }}{% if tools %}[TOOL_CALLS][ARGS]{% endif %}"
CHANNELS = "{{ messages[0].content }}{{ tools }}<|start|>assistant{# <|channel|> #}"


class Script(Nines):
    """A model that generates the given text."""

    def __init__(self, ids: list[int]) -> None:
        super().__init__()
        self._ids = iter(ids)

    def collect(self) -> StepResult:
        assert self._plan is not None
        return StepResult([next(self._ids) if samples else -1 for samples in self._plan.samples])


class Now(Executor):
    """An executor that runs each job at once."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":  # noqa: ANN401 # as Executor has it
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def load(directory: Path, template: str) -> TextEncoder:
    """A tokenizer with the marks of the formats as tokens, one of them special."""
    tokenizer: Tokenizer = byte_level_bpe(directory)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(TEMPLATES.get(template, template))
    return TextEncoder.load(directory)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextEncoder]:
    encoder = load(tmp_path_factory.mktemp("qwen"), "qwen")
    yield encoder
    encoder.close()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextEncoder]:
    encoder = load(tmp_path_factory.mktemp("llama"), "llama3")
    yield encoder
    encoder.close()


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextEncoder]:
    encoder = load(tmp_path_factory.mktemp("deepseek"), "deepseek")
    yield encoder
    encoder.close()


def answer(encoder: TextEncoder, said: str, work: Generate) -> list[Text]:
    """The gateway's answer if the model generated `said` and ended."""
    ids = encoder.tokenizer.encode(said, add_special_tokens=False).ids
    texts: list[Message] = []
    detokenizer = DetokenizerStage(encoder, texts.append, unrecorded)
    scheduler = Scheduler(KVCache(600, 8, prefix_caching=True), LIMITS, (EOS,), 4, 4000)

    def emit(message: Message) -> None:
        if not isinstance(message, Report):
            detokenizer.handle(message)
            detokenizer.turn()

    engine = EngineStage(Engine(scheduler, Script([*ids, EOS])), RingMembership("engine-0", 1), emit, unrecorded)
    tokenizer = TokenizerStage(
        encoder, idle_constraints(), LIMITS, EncodingThreads(Now(), lambda call: call()), engine.handle, unrecorded
    )
    tokenizer.handle(Submit(Envelope("a" * 32, "g"), work))
    while engine.turn():
        pass
    found = [one for one in texts if isinstance(one, Text)]
    others = [type(one) for one in texts if not isinstance(one, Text)]
    ended_here = found[-1].finish in ENDED_BY_TEXT
    assert others == ([Grant] if ended_here else [])  # for what was sampled behind the end
    assert detokenizer.num_open == engine.num_open == 0
    return found


def chat(tools: tuple[Tool, ...] = TOOLS, variables: str = "{}", **fields: Any) -> Generate:  # noqa: ANN401 # any field
    params = SamplingParams(max_tokens=500, temperature=0.0)
    return Generate(ChatPrompt(ASK, tools=tools, variables=variables), params, **fields)


def whole(texts: list[Text]) -> tuple[str, str, list[tuple[str, str]]]:
    calls = [(call.name, call.arguments) for text in texts for call in text.tool_calls]
    return "".join(one.text for one in texts), "".join(one.reasoning for one in texts), calls


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich 😀"}}\n</tool_call>'
SAID = ("weather", '{"city":"Zürich 😀"}')


def test_reasoning_and_calls_are_told_apart(qwen: TextEncoder) -> None:
    texts = answer(qwen, f"<think>\nI look é.\n</think>\n\nLooking.\n{CALL}\n{CALL}", chat())
    assert whole(texts) == ("Looking.", "I look é.", [SAID, SAID])
    ids = [call.id for text in texts for call in text.tool_calls]
    assert len(set(ids)) == 2 and all(len(one) == 9 and one.isalnum() for one in ids)
    assert texts[-1].finish is FinishReason.EOS
    reasoning = qwen.tokenizer.encode("<think>\nI look é.\n</think>", add_special_tokens=False).ids
    assert sum(text.num_reasoning for text in texts) == len(reasoning)
    again = answer(qwen, f"{CALL}\n{CALL}", chat())
    assert [call.id for text in again for call in text.tool_calls] == ids  # a replay repeats them


def test_one_call_ends_the_output_where_one_is_allowed(qwen: TextEncoder) -> None:
    work = chat()
    assert isinstance(work.prompt, ChatPrompt)
    one = msgspec.structs.replace(work, prompt=msgspec.structs.replace(work.prompt, parallel=False))
    texts = answer(qwen, f"<think>why</think>Look.\n{CALL}\n{CALL} more", one)
    assert whole(texts) == ("Look.", "why", [SAID]) and texts[-1].finish is FinishReason.TOOL_CALL
    texts = answer(qwen, "none needed", one)
    assert whole(texts) == ("none needed", "", []) and texts[-1].finish is FinishReason.EOS


def test_calls_come_in_parts_where_that_is_asked_for(qwen: TextEncoder) -> None:
    texts = answer(qwen, f"so\n{CALL}\n{CALL}", chat(text=TextOptions(call_parts=True)))
    parts = [part for text in texts for part in text.tool_call_parts]
    calls = [call for text in texts for call in text.tool_calls]
    assert [(part.id, part.name) for part in parts if part.name] == [(call.id, call.name) for call in calls]
    for index in (0, 1):
        written = "".join(part.arguments for part in parts if part.index == index)
        assert json.loads(written) == json.loads(SAID[1]) and sum(part.index == index for part in parts) > 3
    assert not any(text.tool_call_parts for text in answer(qwen, CALL, chat()))


def test_sections_are_text_unless_they_are_asked_for(qwen: TextEncoder) -> None:
    said = f"<think>why</think>{CALL}"
    assert whole(answer(qwen, said, chat(text=TextOptions(split_sections=False)))) == (said, "", [])
    assert whole(answer(qwen, said, chat(tools=()))) == (CALL, "why", [])


def test_reasoning_that_the_prompt_closed_is_over(qwen: TextEncoder) -> None:
    texts = answer(qwen, "so", chat(tools=(), variables='{"enable_thinking": false}'))
    assert whole(texts) == ("so", "", [])


def test_reasoning_that_the_prompt_opened(deepseek: TextEncoder) -> None:
    assert whole(answer(deepseek, "I look.\n</think>\n\nso", chat(tools=()))) == ("so", "I look.", [])
    assert whole(answer(deepseek, "I look", chat(tools=()))) == ("", "I look", [])


def test_a_special_token_opens_a_call(llama: TextEncoder) -> None:
    call = '{"name": "weather", "parameters": {"city": "Zürich 😀"}}'
    assert whole(answer(llama, f"<|python_tag|>{call}", chat())) == ("", "", [SAID])
    assert whole(answer(llama, f"so <|python_tag|>{call}", chat())) == ("so ", "", [SAID])
    assert whole(answer(llama, call, chat())) == ("", "", [SAID])
    assert whole(answer(llama, "<|python_tag|>print(1)", chat())) == ("print(1)", "", [])
    shown = chat(text=TextOptions(skip_special_tokens=False))
    assert whole(answer(llama, "<|python_tag|>print(1)", shown)) == ("<|python_tag|>print(1)</s>", "", [])


def test_marks_that_are_special_tokens_are_read_and_not_shown(tmp_path: Path) -> None:
    encoder = load(tmp_path, MISTRAL)
    try:
        said = '[TOOL_CALLS]weather[ARGS]{"city": "Zürich 😀"}'
        assert whole(answer(encoder, f"é {said}{said}", chat())) == ("é ", "", [SAID, SAID])
        assert whole(answer(encoder, "[TOOL_CALLS]hm", chat())) == ("hm", "", [])
        stopped = answer(encoder, f"one [ARGS] two{said}", chat(stops=Stops(("two",))))
        assert whole(stopped) == ("one  ", "", []) and stopped[-1].stop_match == "two"
        shown = chat(text=TextOptions(skip_special_tokens=False))
        assert whole(answer(encoder, f"{said}[ARGS]", shown)) == ("[ARGS]</s>", "", [SAID])
    finally:
        encoder.close()


def test_channels_become_sections(tmp_path: Path) -> None:
    encoder = load(tmp_path, CHANNELS)
    try:
        said = "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>"
        assert whole(answer(encoder, f"{said}final<|message|>so", chat(tools=()))) == ("so", "why", [])
        call = 'commentary to=functions.weather <|message|>{"city": "Zürich 😀"}<|call|>'
        texts = answer(encoder, said + call, chat())
        assert whole(texts) == ("", "why", [SAID]) and sum(one.num_reasoning for one in texts) > 0
    finally:
        encoder.close()


def test_a_stop_string_ends_a_section(qwen: TextEncoder) -> None:
    texts = answer(qwen, "<think>one two three", chat(stops=Stops(("two",))))
    assert whole(texts) == ("", "one ", []) and texts[-1].stop_match == "two"
    broken = answer(qwen, CALL, chat(stops=Stops(("Zürich",))))
    assert whole(broken) == ('<tool_call>\n{"name": "weather", "arguments": {"city": "', "", [])


def test_special_tokens_are_shown_where_that_is_asked_for(qwen: TextEncoder) -> None:
    said = "a<s>b"
    assert whole(answer(qwen, said, chat()))[0] == "ab"
    assert whole(answer(qwen, said, chat(text=TextOptions(skip_special_tokens=False))))[0] == "a<s>b</s>"
