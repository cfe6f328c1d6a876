"""A default is stated once, on the command line; everything else with the same meaning takes it from there."""

import ast
import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.request import Limits
from sluice_server.engine.scheduler.settings import SchedulerSettings, settings_of
from sluice_server.services.cli.options import CONFIG, POSITIONAL, takes_settings
from sluice_server.services.config import ServiceConfig
from sluice_server.services.gateway.settings import GatewaySettings

ROOT = Path(__file__).parents[2]
SETTINGS = {field.name: field.default for cls in (EngineConfig, ServiceConfig) for field in dataclasses.fields(cls)}
NAMED_OTHERWISE = {"num_gateways": "gateways"}
# The name of a setting, and another meaning: what computes, what a request asks for, what an engine reports.
OTHER_MEANING = {
    ("engine/executor/computing.py", "threads"),
    ("engine/parallel/shape.py", "sum_shards"),
    ("engine/request.py", "max_adapters"),
    ("engine/request.py", "max_draft_tokens"),
    ("engine/scheduler/validation.py", "max_draft_tokens"),
    ("engine/scheduler/settings.py", "max_draft_tokens"),
    ("services/messages/details.py", "block_size"),
    ("services/process/model_table.py", "grace_s"),
}


def test_the_command_lines_defaults_are_the_fields() -> None:
    signature = inspect.signature(takes_settings(lambda engine, service: None))
    defaults = {name: parameter.default for name, parameter in signature.parameters.items()}
    assert {name: value for name, value in defaults.items() if name not in ("context", POSITIONAL, CONFIG)} == SETTINGS


def test_a_gateway_has_the_same_defaults() -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(GatewaySettings)}
    shared = {name for name in defaults if NAMED_OTHERWISE.get(name, name) in SETTINGS}
    shared -= {"access_file", "model", "gateways"}  # A gateway's: contents, a path, ids.
    assert len(shared) >= 11
    assert {name: defaults[name] for name in shared} == {
        name: SETTINGS[NAMED_OTHERWISE.get(name, name)] for name in shared
    }


def test_a_scheduler_and_the_limits_have_the_same_defaults() -> None:
    assert settings_of(EngineConfig()) == SchedulerSettings()
    assert Limits(1, 1).max_prompt_bytes == SETTINGS["max_prompt_bytes"]


def defaults_in(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Names and default values of all fields and parameters."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and field.value is not None and isinstance(field.target, ast.Name):
                    yield field.target.id, field.value
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            plain = [*node.args.posonlyargs, *node.args.args]
            given = node.args.defaults
            yield from ((one.arg, value) for one, value in zip(plain[len(plain) - len(given) :], given, strict=True))
            named = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
            yield from ((one.arg, value) for one, value in named if value is not None)


def is_number(value: ast.expr) -> bool:
    """Whether it is a literal number, as 5.0 or 1 << 20."""
    parts = (value.left, value.right) if isinstance(value, ast.BinOp) else (value,)
    return all(isinstance(one, ast.Constant) and type(one.value) in (int, float) for one in parts)


def test_no_number_of_a_setting_is_written_a_second_time() -> None:
    found = {
        (str(path.relative_to(ROOT)), name)
        for room in ("engine", "services")
        for path in (ROOT / room).rglob("*.py")
        if path.name != "config.py" and path.suffix == ".py"
        for name, value in defaults_in(ast.parse(path.read_text()))
        if NAMED_OTHERWISE.get(name, name) in SETTINGS and is_number(value)
    }
    assert found == OTHER_MEANING
