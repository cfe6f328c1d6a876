"""Constraints at the gateway: every form and its limits, incompatible options, and the echo."""

from typing import Any

import pytest
from sluice.v1 import types_pb2

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.services.gateway.contract import translate
from sluice_server.services.messages.work import Constraint, ConstraintForm, Generate
from tests.services.gateway.fake_ring import SETTINGS, spec

SCHEMA = '{"type": "integer"}'
TOOLS = {
    "messages": [{"role": types_pb2.ROLE_USER, "parts": [{"text": "hi"}]}],
    "tools": [{"name": "f"}],
    "tool_choice": {"mode": types_pb2.TOOL_MODE_REQUIRED},
}


def asked(constraint: dict[str, Any], **fields: Any) -> translate.TranslatedRequest:  # noqa: ANN401 # of a spec
    return translate.generation(spec(constraint=constraint, **fields), 0, SETTINGS)


@pytest.mark.parametrize(
    ("constraint", "expected"),
    [
        ({"json_schema": SCHEMA}, Constraint(ConstraintForm.JSON_SCHEMA, SCHEMA)),
        ({"json_object": {}}, Constraint(ConstraintForm.JSON_SCHEMA, '{"type": "object"}')),
        ({"regex": "a+"}, Constraint(ConstraintForm.REGEX, "a+")),
        ({"grammar": 'root ::= "a"'}, Constraint(ConstraintForm.GRAMMAR, 'root ::= "a"')),
        ({"choice": {"texts": ["a", "é"]}}, Constraint(ConstraintForm.CHOICE, choices=("a", "é"))),
    ],
)
def test_every_form_is_passed_on_and_echoed(constraint: dict[str, Any], expected: Constraint) -> None:
    made = asked(constraint)
    assert isinstance(made.work, Generate) and made.work.constraint == expected
    assert made.effective is not None and made.effective.constraint == types_pb2.Constraint(**constraint)


def test_without_one_the_output_is_free() -> None:
    made = translate.generation(spec(), 0, SETTINGS)
    assert isinstance(made.work, Generate) and made.work.constraint is None
    assert made.effective is not None and not made.effective.HasField("constraint")


@pytest.mark.parametrize(
    ("constraint", "fields", "field"),
    [
        ({}, {}, "constraint"),
        ({"json_schema": ""}, {}, "constraint.json_schema"),
        ({"json_schema": " " * (64 << 10) + "{}"}, {}, "constraint.json_schema"),
        ({"regex": "é" * (8 << 10) + "a"}, {}, "constraint.regex"),
        ({"grammar": "x" * ((64 << 10) + 1)}, {}, "constraint.grammar"),
        ({"choice": {}}, {}, "constraint.choice.texts"),
        ({"choice": {"texts": ["a"] * 1025}}, {}, "constraint.choice.texts"),
        ({"choice": {"texts": ["a", ""]}}, {}, "constraint.choice.texts[1]"),
        ({"choice": {"texts": ["a" * 4097]}}, {}, "constraint.choice.texts[0]"),
        ({"choice": {"texts": ["a" * 4096] * 17}}, {}, "constraint.choice.texts"),
        ({"json_object": {}}, {"stop": {"ignore_eos": True}}, "stop.ignore_eos"),
        ({"json_object": {}}, {"sampling": {"allowed_token_ids": [3]}}, "allowed_token_ids"),
        ({"json_object": {}}, {"chat": TOOLS}, "constraint"),
    ],
    ids=range(13),
)
def test_what_is_wrong_is_refused_by_its_field(constraint: dict[str, Any], fields: dict[str, Any], field: str) -> None:
    with pytest.raises(ServiceError) as caught:
        asked(constraint, **fields)
    assert (caught.value.code, caught.value.field) == (Code.INVALID_ARGUMENT, field)
    assert len(caught.value.message) < 300


def test_a_beam_search_is_not_constrained() -> None:
    with pytest.raises(ServiceError) as caught:
        asked({"regex": "a"}, sampling={"beam": {"width": 2}})
    assert (caught.value.code, caught.value.field) == (Code.UNIMPLEMENTED, "constraint")


def test_a_required_call_goes_with_what_a_constraint_goes_with() -> None:
    with pytest.raises(ServiceError) as caught:
        translate.generation(spec(chat=TOOLS, stop={"ignore_eos": True}), 0, SETTINGS)
    assert caught.value.field == "stop.ignore_eos"
