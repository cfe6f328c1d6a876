"""The description of a model: the defaults of its own files, where they exist."""

import dataclasses
from pathlib import Path

from sluice_server.engine.models.registry import read_served
from sluice_server.engine.request import Limits, SamplingParams
from sluice_server.services.checkpoint.model_source import resolve_model
from sluice_server.services.gateway.model import model_info


def test_defaults_are_those_of_the_checkpoint() -> None:
    directory: Path = resolve_model("demo", "").directory
    model = read_served(directory)
    limits = Limits(context_length=64, vocab_size=model.vocab_size)
    bare = dataclasses.replace(model, defaults=SamplingParams())
    assert model_info("m", "r", "l", directory, bare, limits).defaults == SamplingParams()
    own = dataclasses.replace(model, defaults=SamplingParams(temperature=0.0, top_k=3, top_p=0.5, min_p=0.1))
    found = model_info("m", "r", "l", directory, own, limits)
    assert found.defaults == SamplingParams(temperature=0.0, top_k=3, top_p=0.5, min_p=0.1)
    assert (found.id, found.revision, found.label, found.context_length) == ("m", "r", "l", 64)
    assert found.eos_ids == model.eos_ids and found.longest_token > 1
