"""The options of a generation as the engine takes them: all that does not depend on its prompt, its model and a drawn
seed.

Clients send the same options again and again, and to check and convert them takes most of the time in which a gateway
translates a request, more so as the caches are cold then. So those seen lately are kept, by the bytes of the request.
"""

import dataclasses
import secrets
from typing import Any, NamedTuple, TypeAlias

from sluice.v1 import types_pb2

from sluice_server.engine.checks import check_params
from sluice_server.engine.request import Limits, SamplingParams
from sluice_server.services.gateway.contract import sampling
from sluice_server.services.messages.work import Scheduling, Stops, TextOptions

MAX_KEPT = 64
MAX_BYTES = 1024  # of options that are kept: longer ones are lists of ids or words, which seldom come again
Key: TypeAlias = tuple[object, ...]
_UNSEEDED = tuple(one.name for one in dataclasses.fields(SamplingParams) if one.name != "seed")


class Options(NamedTuple):
    """What a request says of how its outputs are made."""

    params: SamplingParams
    words: tuple[str, ...]
    stops: Stops
    text: TextOptions
    scheduling: Scheduling


class OptionMemo:
    """Makes options under one set of limits and defaults, and keeps the last ones. Errors are not kept."""

    def __init__(self, limits: Limits, defaults: SamplingParams, eos_ids: tuple[int, ...]) -> None:
        self._limits = limits
        self._defaults = defaults
        self._eos_ids = eos_ids
        self._kept: dict[Key, tuple[Options, dict[str, Any]]] = {}  # beside each, its parameters without the seed

    def of(self, spec: types_pb2.GenerationSpec, priority: int, *, is_open: bool) -> Options:
        """Returns the options of a request; an absent seed is drawn. Raises `ServiceError`."""
        key = _key(spec, priority, is_open=is_open)
        kept = None if key is None else self._kept.get(key)
        if kept is None:
            made = self._make(spec, priority, is_open=is_open)
            if key is not None:
                self._keep(key, made)
            return made
        found, values = kept
        if spec.sampling.HasField("seed"):
            return found
        return found._replace(params=SamplingParams(**values, seed=secrets.randbits(64)))

    def _keep(self, key: Key, made: Options) -> None:
        if len(self._kept) >= MAX_KEPT:
            del self._kept[next(iter(self._kept))]
        self._kept[key] = made, {name: getattr(made.params, name) for name in _UNSEEDED}

    def _make(self, spec: types_pb2.GenerationSpec, priority: int, *, is_open: bool) -> Options:
        limits = self._limits
        params = sampling.sampling_params(spec, self._defaults, limits)
        check_params(params, limits)
        return Options(
            params,
            sampling.bad_words(spec.sampling, limits),
            sampling.stops(spec.stop, limits, self._eos_ids),
            sampling.text(spec),
            sampling.scheduling(spec, priority, limits, is_open=is_open),
        )


def _key(spec: types_pb2.GenerationSpec, priority: int, *, is_open: bool) -> Key | None:
    """Returns all that `_make` reads of a request, as bytes; None for what is not worth keeping."""
    parts = (spec.sampling, spec.stop, spec.output, spec.scheduling, spec.cache, spec.speculation)
    encoded = [part.SerializeToString() for part in parts]
    if sum(map(len, encoded)) > MAX_BYTES:
        return None
    chat = spec.chat if spec.HasField("chat") else None
    is_single = chat is not None and chat.HasField("parallel_tool_calls") and not chat.parallel_tool_calls
    credit = spec.credit_window if spec.HasField("credit_window") else None
    return (*encoded, priority, is_open, chat is None, is_single, credit)
