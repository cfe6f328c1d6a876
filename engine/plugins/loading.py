"""Imports the allowed plugins when an engine is built, and checks that they are what this version expects.

Every failure is a ServiceError INVALID_SETTING that names plugin and package: an engine starts with all of its plugins,
or not at all.
"""

import contextlib
import dataclasses
import hashlib
import inspect
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.models.config import ModelConfig
from sluice_server.engine.models.model import Model
from sluice_server.engine.models.registry import ARCHITECTURES, traits_of
from sluice_server.engine.models.traits import ArchitectureTraits
from sluice_server.engine.plugins.entry_points import MODELS, NO_PLUGINS, Plugin, find_plugins, wrong
from sluice_server.engine.plugins.interface import (
    API,
    AttentionPlugin,
    LogitsProcessor,
    ModelPlugin,
    ProcessorContext,
    SamplingStrategy,
)
from sluice_server.engine.plugins.sampling import NO_SAMPLING, SamplingPlugins

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedPlugins:
    """The plugins of one engine.

    Attributes:
        model: of the checkpoint's architecture, or with attention of its own; None if all is this package's.
        identity: names the plugins that compute the model: package, version and code; empty without any.
        sampling: all logits processors and sampling strategies.
        notes: for the operator, a line for each plugin.
        has_attention: whether one of them computes attention.
    """

    model: ModelPlugin | None = None
    identity: str = ""
    sampling: SamplingPlugins = NO_SAMPLING
    notes: tuple[str, ...] = ()
    has_attention: bool = False

    def beside(self, library: str) -> "LoadedPlugins":
        """Returns the same where a library computes a part of the model."""
        return dataclasses.replace(self, identity=" ".join(filter(None, (self.identity, library))))


def load_plugins(allowed: str, config: ModelConfig) -> LoadedPlugins:
    """Imports the plugins with these names. Raises ServiceError for one that is missing, incompatible or broken."""
    found = find_plugins(allowed)
    if found is NO_PLUGINS:
        return LoadedPlugins()
    models = {name: _model(one) for name, one in found.models.items()}
    context = ProcessorContext(config.vocab_size, config.eos_ids)
    processors: dict[str, LogitsProcessor] = {
        name: _made(one, context, "check", "apply") for name, one in found.processors.items()
    }
    strategies: dict[str, SamplingStrategy] = {
        name: _made(one, context, "check", "choose") for name, one in found.strategies.items()
    }
    each = (*found.models.values(), *found.processors.values(), *found.strategies.values(), *found.attention.values())
    own, names = models.get(config.architecture), []
    if own is not None:
        _check_traits(found.models[config.architecture], own, config)
        names.append(_identity(found.models[config.architecture], own.model, own.traits))
    if found.attention:
        plugin, attention = _attention(found.attention)
        own = _with_attention(own, attention)
        names.append(_identity(plugin, attention.attend))
    return LoadedPlugins(
        model=own,
        identity=" ".join(names),
        sampling=SamplingPlugins(processors, strategies),
        notes=tuple(_note(one, config) for one in each),
        has_attention=bool(found.attention),
    )


def _note(plugin: Plugin, config: ModelConfig) -> str:
    if plugin.group == MODELS and plugin.name != config.architecture:
        return f"{plugin} is loaded, and not in use: config.json names {config.architecture!r}"
    return f"{plugin} is loaded"


def _model(plugin: Plugin) -> ModelPlugin:
    if plugin.name in ARCHITECTURES:
        raise wrong(f"{plugin} names an architecture that this server has itself: rename it, in config.json too")
    made = _imported(plugin)
    if not isinstance(made, ModelPlugin):
        raise wrong(f"{plugin} is a {type(made).__name__}, and no ModelPlugin")
    _check_api(plugin, made)
    if not (isinstance(made.model, type) and issubclass(made.model, Model)):
        raise wrong(f"{plugin}: its model is no subclass of Model")
    return made


def _attention(found: Mapping[str, Plugin]) -> tuple[Plugin, AttentionPlugin]:
    """Returns the only attention of another package."""
    if len(found) > 1:
        names = " and ".join(repr(name) for name in found)
        raise wrong(f"{names} would both compute attention: allow one of them")
    (plugin,) = found.values()
    made = _imported(plugin)
    if not isinstance(made, AttentionPlugin):
        raise wrong(f"{plugin} is a {type(made).__name__}, and no AttentionPlugin")
    _check_api(plugin, made)
    return plugin, made


def _with_attention(own: ModelPlugin | None, attention: AttentionPlugin) -> ModelPlugin:
    """Returns a plugin's model, or this package's own, with an attention of another package."""
    code = None if own is None else own.traits

    def traits(config: ModelConfig) -> ArchitectureTraits:
        return dataclasses.replace(traits_of(config, code), attention=attention.attend)

    return ModelPlugin(API, traits, Model if own is None else own.model)


def _check_traits(plugin: Plugin, model: ModelPlugin, config: ModelConfig) -> None:
    """Raises ServiceError if there are no traits of this checkpoint: its own, or one that names the plugin."""
    try:
        traits = model.traits(config)
    except ServiceError:
        raise
    except Exception as error:
        raise _failed(plugin, "has no traits for this checkpoint", error) from error
    if not isinstance(traits, ArchitectureTraits) or len(traits.windows) != config.num_layers:
        raise wrong(
            f"{plugin}: its traits must be ArchitectureTraits with a window for each of {config.num_layers} layers"
        )


def _made(plugin: Plugin, context: ProcessorContext, *methods: str) -> Any:  # noqa: ANN401 # another package's
    """Returns the object that a plugin makes, which has these methods."""
    factory = _imported(plugin)
    try:
        made = factory(context)
    except Exception as error:
        raise _failed(plugin, "could not be made", error) from error
    _check_api(plugin, made)
    for name in methods:
        if not callable(getattr(made, name, None)):
            raise wrong(f"{plugin} has no method {name}")
    return made


def _imported(plugin: Plugin) -> Any:  # noqa: ANN401 # whatever another package has there
    try:
        return plugin.entry.load()
    except Exception as error:
        raise _failed(plugin, "could not be imported", error) from error


def _check_api(plugin: Plugin, made: object) -> None:
    api = getattr(made, "api", None)
    if api != API:
        raise wrong(f"{plugin} was written for version {api!r} of the interface; this server has {API}")


def _failed(plugin: Plugin, what: str, error: Exception) -> ServiceError:
    logger.error("%s %s", plugin, what, exc_info=error)
    return wrong(f"{plugin} {what}: {type(error).__name__}: {error}".splitlines()[0])


@contextlib.contextmanager
def loading(plugin: ModelPlugin | None, architecture: str) -> Iterator[None]:
    """Names the plugin in errors of its code while a checkpoint is loaded; does nothing without one."""
    try:
        yield
    except (ServiceError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if plugin is None:
            raise
        logger.error("the plugin %s failed to load the checkpoint", architecture, exc_info=error)
        text = f"{architecture!r} failed to load the checkpoint: {type(error).__name__}: {error}"
        raise wrong(text.splitlines()[0]) from error


def _identity(plugin: Plugin, *code: Any) -> str:  # noqa: ANN401 # classes and functions
    """Names package, version and the code of the modules that compute: what a package's version leaves open."""
    digest = hashlib.sha256()
    for module in dict.fromkeys(map(inspect.getmodule, code)):
        file = getattr(module, "__file__", None)
        digest.update(b"" if file is None else Path(file).read_bytes())
    return f"{plugin.package} {digest.hexdigest()[:16]}"
