"""Options that were seen lately are the same as those that are made anew, but for their seed."""

import dataclasses
from collections.abc import Callable

import pytest
from sluice.v1 import types_pb2

from sluice_server.engine.errors import ServiceError
from sluice_server.services.gateway.contract import options
from sluice_server.services.gateway.contract.options import OptionMemo, Options
from tests.services.gateway.fake_ring import SETTINGS, settings

Change = Callable[[types_pb2.GenerationSpec], object]
CHANGES: tuple[Change, ...] = (
    lambda spec: None,
    lambda spec: spec.token_ids.ids.append(1),
    lambda spec: setattr(spec.sampling, "max_tokens", 3),
    lambda spec: setattr(spec.sampling, "seed", 7),
    lambda spec: spec.sampling.bad_words.append("bad"),
    lambda spec: spec.stop.strings.append("end"),
    lambda spec: setattr(spec.stop, "ignore_eos", True),
    lambda spec: setattr(spec.output, "logprobs", 0),
    lambda spec: setattr(spec.output, "skip_special_tokens", False),
    lambda spec: setattr(spec.scheduling, "priority", 2),
    lambda spec: setattr(spec.cache, "bypass", True),
    lambda spec: setattr(spec.speculation, "enabled", False),
    lambda spec: setattr(spec, "credit_window", 5),
    lambda spec: spec.chat.messages.add(role=types_pb2.ROLE_USER),
    lambda spec: setattr(spec.chat, "parallel_tool_calls", True),
)


def new() -> OptionMemo:
    return settings().options


def seedless(found: Options) -> Options:
    return found._replace(params=dataclasses.replace(found.params, seed=0))


def test_options_are_those_made_anew() -> None:
    kept = new()
    for _ in range(2):
        for change in CHANGES:
            for priority, is_open in ((0, False), (1, False), (0, True)):
                spec = types_pb2.GenerationSpec()
                change(spec)
                found = kept.of(spec, priority, is_open=is_open)
                assert seedless(found) == seedless(new().of(spec, priority, is_open=is_open))
                assert not spec.sampling.HasField("seed") or found.params.seed == 7


def test_each_request_gets_a_seed_of_its_own() -> None:
    kept = new()
    assert len({kept.of(types_pb2.GenerationSpec(), 0, is_open=False).params.seed for _ in range(20)}) == 20


def test_false_calls_of_a_chat_are_refused_each_time() -> None:
    """What says whether calls are looked for is of the chat, not of the output."""
    kept, spec = new(), types_pb2.GenerationSpec()
    spec.chat.parallel_tool_calls, spec.output.split_sections = True, False
    kept.of(spec, 0, is_open=False)
    spec.chat.parallel_tool_calls = False
    for _ in range(2):
        with pytest.raises(ServiceError, match="parallel_tool_calls"):
            kept.of(spec, 0, is_open=False)


def test_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(options, "check_params", lambda params, limits: made.append(params.max_tokens))
    kept = new()

    def ask(max_tokens: int, num_words: int = 0) -> None:
        spec = types_pb2.GenerationSpec(sampling=types_pb2.SamplingParams(max_tokens=max_tokens))
        spec.sampling.bad_words.extend(["a" * 100] * num_words)
        kept.of(spec, 0, is_open=False)

    for max_tokens in range(1, options.MAX_KEPT + 2):
        ask(max_tokens)
    del made[:]
    ask(2)
    assert not made
    ask(1)
    assert made == [1]
    ask(1, num_words=20)
    ask(1, num_words=20)
    assert made == [1, 1, 1], "long ones are not kept"


def test_other_settings_share_none() -> None:
    assert dataclasses.replace(SETTINGS, grace_s=1.0).options is not SETTINGS.options
