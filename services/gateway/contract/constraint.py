"""Translates a constraint of the contract into work: checks its form and size. The tokenizer checks its contents."""

from sluice.v1 import types_pb2

from sluice_server.engine.checks import check_constrained, check_num
from sluice_server.engine.errors import invalid
from sluice_server.engine.request import SamplingParams
from sluice_server.services.messages.work import ChatPrompt, Constraint, ConstraintForm, PromptInput

MAX_SCHEMA_BYTES = 64 << 10
MAX_REGEX_BYTES = 16 << 10
MAX_GRAMMAR_BYTES = 64 << 10
MAX_CHOICES = 1024
MAX_CHOICE_BYTES = 4096
MAX_CHOICES_BYTES = 64 << 10
_ANY_OBJECT = '{"type": "object"}'


def constraint(spec: types_pb2.GenerationSpec, prompt: PromptInput, params: SamplingParams) -> Constraint | None:
    """Returns the constraint; None where the output is free or must be a tool call. Raises `ServiceError` naming the
    invalid field."""
    must_call = isinstance(prompt, ChatPrompt) and bool(prompt.must_call)
    if not spec.HasField("constraint"):
        if must_call or (isinstance(prompt, ChatPrompt) and any(tool.strict for tool in prompt.tools)):
            check_constrained(params)
        return None
    if must_call:
        raise invalid("constraint", "does not go with a tool call that is required: leave one of the two out")
    check_constrained(params)
    asked = spec.constraint
    match asked.WhichOneof("form"):
        case "json_schema":
            return _text(ConstraintForm.JSON_SCHEMA, asked.json_schema, MAX_SCHEMA_BYTES)
        case "json_object":
            return Constraint(ConstraintForm.JSON_SCHEMA, _ANY_OBJECT)
        case "regex":
            return _text(ConstraintForm.REGEX, asked.regex, MAX_REGEX_BYTES)
        case "grammar":
            return _text(ConstraintForm.GRAMMAR, asked.grammar, MAX_GRAMMAR_BYTES)
        case "choice":
            return Constraint(ConstraintForm.CHOICE, choices=_choices(asked.choice))
        case _:
            raise invalid("constraint", "has no form: send json_schema, json_object, regex, grammar or choice")


def _text(form: ConstraintForm, source: str, limit: int) -> Constraint:
    size = len(source.encode())
    if not 1 <= size <= limit:
        raise invalid(f"constraint.{form}", f"has {size} bytes; 1 to {limit} are allowed", limit=limit)
    return Constraint(form, source)


def _choices(choice: types_pb2.Choice) -> tuple[str, ...]:
    field, num = "constraint.choice.texts", len(choice.texts)
    check_num(field, num, MAX_CHOICES)
    if not num:
        raise invalid(field, f"is empty; 1 to {MAX_CHOICES} texts are allowed", limit=1)
    total = 0
    for at, text in enumerate(choice.texts):
        size = len(text.encode())
        total += size
        if not 1 <= size <= MAX_CHOICE_BYTES:
            raise invalid(f"{field}[{at}]", f"has {size} bytes; 1 to {MAX_CHOICE_BYTES} are allowed")
    if total > MAX_CHOICES_BYTES:
        raise invalid(field, f"have {total} bytes together; at most {MAX_CHOICES_BYTES}", limit=MAX_CHOICES_BYTES)
    return tuple(choice.texts)
