"""Every float of a generation at the edges of float32 and float64, before a real engine: served or refused by name,
without an internal error. Values are checked in double precision and computed in single precision."""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from sluice.v1 import types_pb2

from sluice_server.engine.engine import Engine
from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.limits import limits_of
from sluice_server.engine.request import EngineRequest, SamplingParams
from sluice_server.services.gateway.contract.translate import generation
from sluice_server.services.gateway.settings import GatewaySettings
from sluice_server.services.messages.work import Generate
from tests.engine.test_engine_oracle import ROOMY, make_engine
from tests.oracle.checkpoints import Shape, make_checkpoint
from tests.services.gateway.fake_ring import settings

VOCAB = 111
FLOATS = (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT)
SMALL = (5e-324, 2.3e-308, 1e-300, 1e-46, 1e-45, 1e-39, 1.17549435e-38, 1.2e-38, 1e-30, 1e-8)
LARGE = (1 - 2**-53, 1 - 2**-26, 1.0, 2.0, 10.0, 100.0, 3.3e38, 3.5e38, 1.7976931348623157e308)
_BOTH = [sign * value for value in (*SMALL, *LARGE) for sign in (1, -1)]
VALUES = (*_BOTH, 0.0, math.nan, math.inf, -math.inf)
PROMPT = (3, 4, 5, 6, 7)


def floats(descriptor: Descriptor, prefix: str = "") -> Iterator[str]:
    """The paths of the fields that hold floats."""
    for field in descriptor.fields:
        if field.message_type is not None:
            yield from floats(field.message_type, f"{prefix}{field.name}.")
        elif field.type in FLOATS:
            yield prefix + field.name


FIELDS = sorted(floats(types_pb2.GenerationSpec.DESCRIPTOR))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("edges"), Shape(vocab=VOCAB), seed=5)


@pytest.fixture(scope="module")
def engine(directory: Path) -> Engine:
    return make_engine(directory, ROOMY)


@pytest.fixture(scope="module")
def gateway(directory: Path) -> GatewaySettings:
    return settings(limits=limits_of(ROOMY, read_config(directory), 1 << 20))


def spec(path: str, value: float) -> types_pb2.GenerationSpec:
    """A request with one float set."""
    made = types_pb2.GenerationSpec(
        token_ids=types_pb2.TokenIds(ids=PROMPT),
        sampling=types_pb2.SamplingParams(max_tokens=6, seed=1),
        stop=types_pb2.StopConditions(ignore_eos=True),
    )
    match path.removeprefix("sampling."):
        case "logit_bias.value":
            made.sampling.logit_bias[5] = value
        case "beam.length_penalty":
            made.sampling.beam.width = 2
            made.sampling.beam.length_penalty = value
        case name:
            setattr(made.sampling, name, value)
    return made


def answers(engine: Engine, asked: dict[str, SamplingParams]) -> tuple[dict[str, list[int]], dict[str, str]]:
    """The tokens of each request, and the reasons of those that failed."""
    for name, params in asked.items():
        engine.add(EngineRequest(name, PROMPT, params))
    tokens: dict[str, list[int]] = {name: [] for name in asked}
    failed: dict[str, str] = {}
    while engine.has_work:
        events = engine.step()
        failed |= {name: error.reason for name, error in events.failed}
        for event in events.sampled:
            tokens[event.request_id].extend(event.token_ids)
    return tokens, failed


def test_every_float_of_the_contract_is_walked() -> None:
    names = {"temperature", "top_p", "min_p", "typical_p", "presence_penalty", "frequency_penalty"}
    names |= {"repetition_penalty", "logit_bias.value", "beam.length_penalty"}
    assert set(FIELDS) == {f"sampling.{name}" for name in names}


@pytest.mark.parametrize("path", FIELDS)
def test_each_edge_is_served_or_refused_by_name(path: str, engine: Engine, gateway: GatewaySettings) -> None:
    asked: dict[str, SamplingParams] = {}
    name = path.removeprefix("sampling.").removeprefix("beam.").removesuffix(".value")
    for value in VALUES:
        try:
            work = generation(spec(path, value), 0, gateway).work
        except ServiceError as error:
            assert (error.code, error.field.split("[")[0]) == (Code.INVALID_ARGUMENT, name)
            continue
        assert isinstance(work, Generate)
        asked[repr(value)] = work.params
    tokens, failed = answers(engine, asked)
    assert failed == {}
    assert {len(found) for found in tokens.values()} == {6}


def test_edges_go_together(engine: Engine) -> None:
    """Each value alone is served; so are they together, and with banned ids and penalties."""
    asked = {
        f"{temperature} {share} {repetition} {min_p}": SamplingParams(
            max_tokens=4,
            ignore_eos=True,
            temperature=temperature,
            top_p=share,
            typical_p=share,
            min_p=min_p,
            repetition_penalty=repetition,
            presence_penalty=2.0,
            bad_token_ids=(1, 2, 5),
            logprobs=2,
        )
        for temperature in (5e-324, 1e-39, 1.0, 100.0)
        for share in (5e-324, 1e-40, 1.0)
        for repetition in (1e-30, 1.0, 100.0)
        for min_p in (0.0, 5e-324, 1.0)
    }
    assert answers(engine, asked)[1] == {}


@pytest.mark.parametrize("name", ["top_p", "temperature"])
@pytest.mark.parametrize("value", [5e-324, 1e-40, 1e-30])
def test_next_to_nothing_leaves_the_most_likely_token(name: str, value: float, engine: Engine) -> None:
    greedy = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.0)
    values = {"temperature": 1.0, "top_p": 1.0, name: value}
    tiny = dataclasses.replace(greedy, temperature=values["temperature"], top_p=values["top_p"])
    tokens, failed = answers(engine, {"greedy": greedy, "tiny": tiny})
    assert failed == {}
    assert tokens["tiny"] == tokens["greedy"]


def test_a_refusal_of_a_penalty_names_value_and_limit(gateway: GatewaySettings) -> None:
    with pytest.raises(ServiceError, match=r"repetition_penalty: 1e-38 is not in \[1e-30, 100\.0\]"):
        generation(spec("sampling.repetition_penalty", 1e-38), 0, gateway)
