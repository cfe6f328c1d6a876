import dataclasses
import weakref

import pytest
from sluice.v1 import control_pb2, inference_pb2, types_pb2

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.parameter_kinds import Biases, Ids, Number
from sluice_server.engine.parameters import CHOICE, FROM_MODEL, PARAMETERS
from sluice_server.engine.request import ProcessorCall, SamplingParams
from sluice_server.services.gateway.contract import translate
from sluice_server.services.gateway.contract.parameters import taken, told_output, told_sampling, told_stop
from sluice_server.services.gateway.contract.sampling import Told
from sluice_server.services.messages.work import Generate
from tests.services.gateway.fake_ring import MODEL, SETTINGS, running, settings, spec

SAID = SamplingParams(temperature=0.5, top_k=7, top_p=0.75, min_p=0.25, typical_p=0.875, repetition_penalty=1.5)
MODELLED = settings(model=dataclasses.replace(MODEL, defaults=SAID))
FULL = SamplingParams(
    max_tokens=9,
    min_tokens=2,
    temperature=0.5,
    top_k=7,
    top_p=0.75,
    min_p=0.25,
    typical_p=0.875,
    presence_penalty=0.5,
    frequency_penalty=-0.5,
    repetition_penalty=1.5,
    logit_bias=((3, 0.5), (5, -1.0)),
    allowed_token_ids=(1, 2, 3),
    seed=2**64 - 1,
    stop_token_ids=(4,),
    ignore_eos=True,
    logprobs=2,
    n=2,
    best_of=3,
    beam_width=4,
    length_penalty=0.5,
    early_stopping=True,
    bad_token_ids=(7,),
    logprob_token_ids=(8,),
    prompt_logprobs=0,
)


def params_of(asked: types_pb2.GenerationSpec) -> tuple[SamplingParams, types_pb2.SamplingParams]:
    """The parameters as the engine gets them, and as they are echoed."""
    found = translate.generation(asked, 0, MODELLED)
    assert isinstance(found.work, Generate) and found.effective is not None
    return found.work.params, found.effective.sampling


def test_every_parameter_comes_and_goes_as_it_is() -> None:
    assert all(row.of(FULL) != row.of(SamplingParams()) for row in PARAMETERS)
    asked = types_pb2.GenerationSpec(
        sampling=told_sampling(FULL, ["a"]),
        stop=told_stop(FULL, ["b"], include=True),
        output=types_pb2.OutputOptions(**told_output(FULL)),
    )
    assert (list(asked.sampling.bad_words), list(asked.stop.strings), asked.stop.include) == (["a"], ["b"], True)
    assert not asked.sampling.HasField("max_tokens")
    asked.sampling.max_tokens = FULL.max_tokens
    assert SamplingParams(**taken(asked, SETTINGS.limits)) == FULL


def test_what_is_off_is_told_by_its_absence() -> None:
    sampling, stop = told_sampling(SamplingParams(), []), told_stop(SamplingParams(), [], include=False)
    assert {field.name for field, _ in sampling.ListFields()} == {row.name for row in CHOICE} - {"max_tokens"} | {"n"}
    assert {field.name for field, _ in stop.ListFields()} == {"include", "ignore_eos"}
    assert told_output(SamplingParams()) == {"logprob_token_ids": ()}


def test_every_fields_type_is_its_parameters() -> None:
    for row in PARAMETERS:
        fields = types_pb2.GenerationSpec.DESCRIPTOR.fields_by_name
        *parts, name = row.field.split(".")
        for one in parts:
            message = fields[one].message_type
            assert message is not None
            fields = message.fields_by_name
        field = fields[name]
        assert field.is_repeated == isinstance(row, Ids | Biases), row.name
        if isinstance(row, Number):
            assert (field.cpp_type in (field.CPPTYPE_DOUBLE, field.CPPTYPE_FLOAT)) == (row.type is float), row.name


@pytest.mark.parametrize("row", FROM_MODEL, ids=lambda row: row.name)
def test_what_is_absent_is_the_models_and_told(row: Number) -> None:
    params, effective = params_of(spec())
    assert row.of(params) == row.of(SAID) != row.neutral
    assert {field.name: value for field, value in effective.ListFields()}[row.name] == row.of(SAID)
    params, _ = params_of(spec(sampling={row.name: row.neutral}))
    assert row.of(params) == row.neutral


async def test_a_model_tells_its_defaults() -> None:
    async with running(MODELLED) as rig:
        answer = await rig.control.GetModel(control_pb2.GetModelRequest(model="toy"))
    found = {field.name: value for field, value in answer.model.defaults.ListFields()}
    assert found == {row.name: row.of(SAID) for row in FROM_MODEL}


def test_a_beam_search_is_not_refused_for_the_models_penalty() -> None:
    params, effective = params_of(spec(sampling={"beam": {"width": 2}}))
    assert params.repetition_penalty == effective.repetition_penalty == 1.0


def test_logits_processors_come_and_go_as_they_are() -> None:
    calls = (ProcessorCall("b", (("x", "1"), ("y", ""))), ProcessorCall("a"))
    limits = dataclasses.replace(SETTINGS.limits, logits_processors=("a", "b"))
    asked = spec(sampling=told_sampling(SamplingParams(logits_processors=calls, max_tokens=3), []))
    found = translate.generation(asked, 0, settings(limits=limits))
    assert isinstance(found.work, Generate) and found.effective is not None
    assert found.work.params.logits_processors == calls
    assert found.effective.sampling.logits_processors == asked.sampling.logits_processors


def test_a_strategy_comes_and_goes_and_puts_the_models_own_choice_aside() -> None:
    limits = dataclasses.replace(SETTINGS.limits, sampling_strategies=("a",))
    defaults = SamplingParams(temperature=0.3, top_k=7)
    here = settings(limits=limits, model=dataclasses.replace(MODEL, defaults=defaults))
    asked = spec(sampling={"strategy": {"name": "a", "arguments": {"x": "1"}}})
    found = translate.generation(asked, 0, here)
    assert isinstance(found.work, Generate) and found.effective is not None
    params = found.work.params
    assert params.strategy == ProcessorCall("a", (("x", "1"),)) and (params.temperature, params.top_k) == (1.0, 0)
    assert found.effective.sampling.strategy == asked.sampling.strategy
    asked.sampling.top_k = 5
    with pytest.raises(ServiceError, match="top_k: the sampling strategy 'a' chooses in its place"):
        translate.generation(asked, 0, here)


@pytest.mark.parametrize("names", [(), ("a",)])
def test_logits_processors_that_are_not_served_are_refused(names: tuple[str, ...]) -> None:
    limits = dataclasses.replace(SETTINGS.limits, logits_processors=names)
    asked = spec(sampling=types_pb2.SamplingParams(logits_processors=[types_pb2.LogitsProcessor(name="b")]))
    said = "'b' is not served; there are a" if names else "was started without any"
    with pytest.raises(ServiceError, match=said) as caught:
        translate.generation(asked, 0, settings(limits=limits))
    assert caught.value.code is (Code.INVALID_ARGUMENT if names else Code.UNIMPLEMENTED)


def test_logits_processors_see_a_whole_prompt() -> None:
    limits = dataclasses.replace(SETTINGS.limits, logits_processors=("a",))
    asked = spec(sampling=types_pb2.SamplingParams(logits_processors=[types_pb2.LogitsProcessor(name="a")]))
    frame = inference_pb2.Open(spec=asked, keep_input_open=True)
    with pytest.raises(
        ServiceError, match="logits_processors and a strategy see a whole prompt: leave one of the two out"
    ):
        translate.opening(frame, 0, settings(limits=limits))


def test_what_a_client_is_told_is_made_once_and_lets_go_of_the_request() -> None:
    made: list[types_pb2.EffectiveParams] = []

    def make() -> types_pb2.EffectiveParams:
        made.append(types_pb2.EffectiveParams())
        return made[-1]

    held = weakref.ref(make)
    told = Told(make)
    assert not made
    first = told.params()
    first.sampling.max_tokens = 3
    del make
    assert told.params() is first is made[0] and len(made) == 1 and held() is None
