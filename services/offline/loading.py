"""Loads the parts of a pipeline from the model's files, as the processes of a service do."""

import contextlib
import sys
from typing import NamedTuple

from sluice_server.engine.built import BuiltEngine
from sluice_server.engine.models.registry import read_served
from sluice_server.engine.parallel.options import check_parallel
from sluice_server.engine.plugins.entry_points import find_plugins
from sluice_server.engine.worker.host.allocator import give_back
from sluice_server.engine.worker.startup.memory import give_back_unused
from sluice_server.services.checkpoint.digests import remembered
from sluice_server.services.checkpoint.model_source import CheckpointFiles, resolve_model
from sluice_server.services.engine.loading import load_engine
from sluice_server.services.gateway.model import model_info
from sluice_server.services.gateway.settings import GatewaySettings
from sluice_server.services.media.image_workers import ImageWorkers
from sluice_server.services.media.preparing import PixelCache
from sluice_server.services.media.processor import read_processor
from sluice_server.services.media.serving import limits_for
from sluice_server.services.offline.options import OfflineConfig
from sluice_server.services.process.background import num_compilers
from sluice_server.services.ranks.settings import config_of_rank
from sluice_server.services.tokenizer.constraints import Constraints
from sluice_server.services.tokenizer.encoding import TextEncoder
from sluice_server.services.tokenizer.found_sections import Parsers
from sluice_server.services.tokenizer.inline_executor import InlineExecutor
from sluice_server.services.tokenizer.loading import load_encoder
from sluice_server.services.tokenizer.prompt_images import PromptImages

NAME = "offline"  # of the gateway, the client and the engine
MAX_OPEN = sys.maxsize  # a batch is admitted as a whole


class LoadedPipeline(NamedTuple):
    """The parts of a pipeline; `closing` releases them."""

    gateway: GatewaySettings
    encoder: TextEncoder
    images: PromptImages | None
    constraints: Constraints
    built: BuiltEngine
    closing: contextlib.ExitStack


def load(settings: OfflineConfig) -> LoadedPipeline:
    """Loads all parts. Raises ServiceError saying what is wrong and what to do, and releases everything then."""
    engine, service = settings
    source = resolve_model(service.model, service.revision)
    contents = CheckpointFiles(source, remembered(), with_weights=True)
    plugins = find_plugins(engine.plugins)
    directory, model = contents.directory, read_served(contents.directory, plugins.models)
    limits = limits_for(engine, model, directory, service.max_prompt_bytes, plugins)
    parsers = Parsers(service.tool_call_parser, service.reasoning_parser)
    stack = contextlib.ExitStack()
    try:
        stack.callback(_give_back)
        loaded = load_encoder(directory, chat_template=service.chat_template, parsers=parsers)
        encoder = stack.enter_context(contextlib.closing(loaded))
        compilers = Constraints(directory / "tokenizer.json", limits.vocab_size, model.eos_ids, num_compilers())
        constraints = stack.enter_context(contextlib.closing(compilers))
        images = None
        if limits.images is not None:
            workers = stack.enter_context(contextlib.closing(ImageWorkers(read_processor(directory, limits.images))))
            images = PromptImages(PixelCache(workers), limits, InlineExecutor())
        group = None
        if engine.num_ranks > 1 and model.encoder is None:  # an encoder refuses them by name
            check_parallel(engine).check(model)  # before processes are started
            from sluice_server.services.ranks.started import started  # loads sockets, which one rank does without

            group = stack.enter_context(started(engine, service, contents.configuration))
            engine = config_of_rank(engine)
        built, revision = load_engine(engine, contents, model, limits, group)
        stack.callback(built.close)
    except BaseException:
        stack.close()
        raise
    info = model_info(source.name, revision, source.label, directory, model, limits)
    gateway = GatewaySettings(
        NAME,
        info,
        limits,
        trust_chat_content=service.trust_chat_content,
        trust_request_chat_template=True,  # it is the caller's own process
        max_open_requests=MAX_OPEN,
        max_reserved_tokens=MAX_OPEN,
    )
    return LoadedPipeline(gateway, encoder, images, constraints, built, stack)


def _give_back() -> None:
    """Returns the memory of weights and cache to the operating system, after all references are gone."""
    give_back_unused()
    give_back()
