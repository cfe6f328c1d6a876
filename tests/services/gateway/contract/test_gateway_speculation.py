"""Speculation at the gateway: its options, their echo, and the statistics in the answer."""

import dataclasses

import msgspec
import pytest
from sluice.v1 import control_pb2, types_pb2

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.request import Limits
from sluice_server.services.gateway.calls.described import features
from sluice_server.services.gateway.contract import translate
from sluice_server.services.gateway.contract.sampling import max_draft_tokens
from sluice_server.services.messages.messages import Submit, Text
from sluice_server.services.messages.work import Generate
from tests.services.gateway.fake_ring import MODEL, SETTINGS, generation, running, stream_request, unary_request

PLAIN = Limits(context_length=100, vocab_size=100)
DRAFTING = dataclasses.replace(PLAIN, max_draft_tokens=8)


@pytest.mark.parametrize(
    ("asked", "num"),
    [({}, None), ({"enabled": True}, None), ({"enabled": False}, 0), ({"max_tokens": 3}, 3), ({"max_tokens": 64}, 64)],
)
def test_what_is_asked_for_reaches_the_engine(asked: dict[str, int], num: int | None) -> None:
    assert max_draft_tokens(types_pb2.SpeculationOptions(**asked), DRAFTING) == num  # type: ignore[arg-type] # literals


@pytest.mark.parametrize(
    ("asked", "limits", "code", "field"),
    [
        ({"max_tokens": 65}, DRAFTING, Code.INVALID_ARGUMENT, "speculation.max_tokens"),
        ({"max_tokens": 0}, DRAFTING, Code.INVALID_ARGUMENT, "speculation.max_tokens"),
        ({"enabled": False, "max_tokens": 2}, DRAFTING, Code.INVALID_ARGUMENT, "speculation.max_tokens"),
        ({"enabled": True}, PLAIN, Code.UNIMPLEMENTED, "speculation.enabled"),
    ],
)
def test_what_cannot_be_is_refused_by_name(asked: dict[str, int], limits: Limits, code: Code, field: str) -> None:
    with pytest.raises(ServiceError, match=field.replace(".", r"\.")) as caught:
        max_draft_tokens(types_pb2.SpeculationOptions(**asked), limits)  # type: ignore[arg-type] # literals
    assert caught.value.code is code


def test_it_is_echoed_as_it_was_asked_for() -> None:
    spec = types_pb2.GenerationSpec(text="x", speculation=types_pb2.SpeculationOptions(max_tokens=3))
    asked = translate.generation(spec, 0, SETTINGS)
    assert asked.effective is not None
    assert asked.effective.speculation.max_tokens == 3
    assert isinstance(asked.work, Generate)
    assert asked.work.scheduling.max_draft_tokens == 3


def test_it_is_a_feature_where_a_proposer_is_configured() -> None:
    assert control_pb2.FEATURE_SPECULATION in features(DRAFTING, MODEL)
    assert control_pb2.FEATURE_SPECULATION not in features(PLAIN, MODEL)


def drafted(submit: Submit) -> list[Text]:
    """Three tokens, of which the second and third were drafts."""
    texts = generation(submit, ["a", "b", "c"])
    return [msgspec.structs.replace(text, drafts=((3 * i, i),) if i else ()) for i, text in enumerate(texts)]


async def test_usage_and_deltas_tell_what_was_drafted() -> None:
    async with running() as rig:
        rig.ring.script = lambda submit: rig.ring.play(*drafted(submit))
        answer = await rig.stub.Generate(unary_request())
        assert (answer.usage.drafted_tokens, answer.usage.accepted_tokens) == (9, 3)
        assert list(answer.usage.drafted_tokens_by_position) == [2, 2, 2, 1, 1, 1]
        assert list(answer.usage.accepted_tokens_by_position) == [2, 1, 0, 0, 0, 0]
        events = [event async for event in rig.stub.StreamGenerate(stream_request())]
        deltas = [event.delta for event in events if event.WhichOneof("event") == "delta"]
        assert sum(delta.drafted_tokens for delta in deltas) == 9
        assert sum(delta.accepted_tokens for delta in deltas) == 3
        assert events[-1].finished.usage.accepted_tokens == 3
