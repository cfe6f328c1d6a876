"""Loads what a pipeline is made of: the model's files, as every process of a service reads its own part of them."""

import contextlib
import sys
from typing import NamedTuple

from sluice_server.engine.build import BuiltEngine
from sluice_server.engine.models.limits import limits_of
from sluice_server.engine.models.registry import read_served
from sluice_server.engine.worker.host.allocator import give_back
from sluice_server.engine.worker.startup.memory import give_back_unused
from sluice_server.services.checkpoint.digests import remembered
from sluice_server.services.checkpoint.model_source import CheckpointFiles, resolve_model
from sluice_server.services.engine.loading import load_engine
from sluice_server.services.gateway.model import model_info
from sluice_server.services.gateway.settings import GatewaySettings
from sluice_server.services.offline.options import Settings
from sluice_server.services.tokenizer.constraints import Constraints
from sluice_server.services.tokenizer.encoding import TextEncoder
from sluice_server.services.tokenizer.loading import load_encoder

NAME = "offline"  # of the one who asks
NUM_COMPILERS = 2  # processes that try constraints out
MAX_OPEN = sys.maxsize  # a batch is let in as a whole


class Loaded(NamedTuple):
    """All of it; `closing` ends it."""

    gateway: GatewaySettings
    encoder: TextEncoder
    constraints: Constraints
    built: BuiltEngine
    closing: contextlib.ExitStack


def load(settings: Settings) -> Loaded:
    """Raises ServiceError naming what is wrong and what to do; nothing is left behind then."""
    engine, service = settings
    source = resolve_model(service.model, service.revision)
    contents = CheckpointFiles(source, remembered(), with_weights=True)
    directory, model = contents.directory, read_served(contents.directory)
    limits = limits_of(engine, model, service.max_prompt_bytes)
    stack = contextlib.ExitStack()
    try:
        stack.callback(_give_back)
        encoder = stack.enter_context(contextlib.closing(load_encoder(directory)))
        compilers = Constraints(directory / "tokenizer.json", limits.vocab_size, model.eos_ids, NUM_COMPILERS)
        constraints = stack.enter_context(contextlib.closing(compilers))
        built, revision = load_engine(engine, contents, model, limits)
        stack.callback(built.close)
    except BaseException:
        stack.close()
        raise
    info = model_info(source.name, revision, source.label, directory, model, limits)
    gateway = GatewaySettings(NAME, info, limits, max_open_requests=MAX_OPEN, max_reserved_tokens=MAX_OPEN)
    return Loaded(gateway, encoder, constraints, built, stack)


def _give_back() -> None:
    """Weights and cache, to which nothing refers any more."""
    give_back_unused()
    give_back()
