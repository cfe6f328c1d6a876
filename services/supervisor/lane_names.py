"""The names of the models of a service: the default, aliases with weights, and those that were given up. Pure."""

from collections.abc import Mapping

from sluice_server.services.process.model_commands import NameModels
from sluice_server.services.process.model_table import LaneEntry, LaneState, ModelTable
from sluice_server.services.supervisor import lane_errors as errors

MAX_GIVEN_UP = 32  # that are remembered


class LaneNames:
    """The names of one service.

    Attributes:
        default: the name that requests without one have; "" for the first model.
        aliases: weights by model, by alias.
        given_up: by lane, why a model that was to be loaded was not.
    """

    def __init__(self, first: ModelTable) -> None:
        self.default = first.default
        self.aliases = {alias: dict(weights) for alias, weights in first.aliases.items()}
        self.given_up: dict[str, str] = {}

    def users(self, model: str) -> list[str]:
        """Returns the aliases that stand for a model, alone or with others."""
        return [alias for alias, weights in self.aliases.items() if model in weights]

    def defaults(self, first: str) -> set[str]:
        """Returns the models of requests that name none; `first` is the first model."""
        return set(self.aliases.get(self.default, {self.default})) if self.default else {first}

    def give_up(self, lane: str, model: str, why: str) -> None:
        """Remembers why a model was not loaded, and takes it from the aliases that it got meanwhile."""
        self.given_up[lane] = why
        while len(self.given_up) > MAX_GIVEN_UP:
            del self.given_up[next(iter(self.given_up))]
        for alias, weights in list(self.aliases.items()):
            weights.pop(model, None)
            if not weights:
                del self.aliases[alias]

    def name(self, asked: NameModels, entries: Mapping[str, LaneEntry]) -> str:
        """Carries out a command; returns what is said of it. Raises ServiceError."""
        models = {one.model: one for one in entries.values()}
        if asked.alias in models:
            raise errors.is_model(asked.alias)
        if not asked.weights and asked.alias not in self.aliases:
            raise errors.unknown_alias(asked.alias)
        if not asked.weights and asked.alias == self.default:
            raise errors.is_default(asked.alias)
        for model in asked.weights:
            if model not in models:
                raise errors.unknown(model, [*models])
            if models[model].state is LaneState.DRAINING:
                raise errors.is_leaving(model)
        if asked.weights:
            self.aliases[asked.alias] = dict(asked.weights)
        else:
            del self.aliases[asked.alias]
        shown = ", ".join(f"{model} ({weight})" for model, weight in asked.weights.items())
        return f"sluice: {asked.alias} is {shown or 'no name of a model any more'}"
