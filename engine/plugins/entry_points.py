"""Finds the plugins that the operator allows among the entry points of installed packages. Imports none of them.

Entry points of four groups count. Without an allowed name nothing is looked up. Depends on the standard library only,
as every process needs the names.
"""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from sluice_server.engine.errors import Code, ServiceError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

MODELS, PROCESSORS, STRATEGIES = "sluice.models", "sluice.logits_processors", "sluice.sampling_strategies"
ATTENTION = "sluice.attention"
GROUPS = (MODELS, PROCESSORS, STRATEGIES, ATTENTION)


@dataclasses.dataclass(frozen=True, slots=True)
class Plugin:
    """One entry point of an installed package.

    Attributes:
        name: of the entry point: an architecture of config.json, what requests call a processor or strategy,
            or what the operator calls an attention.
        package: the distribution with its version.
    """

    name: str
    group: str
    package: str
    entry: "EntryPoint"

    def __str__(self) -> str:
        return f"{self.group} plugin {self.name!r} of {self.package}"


@dataclasses.dataclass(frozen=True, slots=True)
class Plugins:
    """The allowed plugins of each group, by name."""

    models: Mapping[str, Plugin] = dataclasses.field(default_factory=dict)
    processors: Mapping[str, Plugin] = dataclasses.field(default_factory=dict)
    strategies: Mapping[str, Plugin] = dataclasses.field(default_factory=dict)
    attention: Mapping[str, Plugin] = dataclasses.field(default_factory=dict)


NO_PLUGINS = Plugins()


def find_plugins(allowed: str) -> Plugins:
    """Returns the plugins with the comma-separated names `allowed`.

    Raises ServiceError INVALID_SETTING for a name that no installed package offers, or that several do.
    """
    names = [name.strip() for name in allowed.split(",") if name.strip()]
    if not names:
        return NO_PLUGINS
    from importlib.metadata import entry_points  # here, as every process imports this module, and few have plugins

    offered = [_plugin(entry) for group in GROUPS for entry in entry_points(group=group)]
    found: dict[str, Plugin] = {}
    for name in dict.fromkeys(names):
        same = list(dict.fromkeys(one for one in offered if one.name == name))
        if not same:
            known = ", ".join(sorted(repr(one.name) for one in offered)) or "none"
            raise wrong(f"{name!r} is offered by no installed package; installed plugins are {known}")
        if len(same) > 1:
            raise wrong(f"{name!r} is offered twice: {same[0]}, {same[1]}; uninstall one of the packages")
        found[name] = same[0]
    return Plugins(*({name: one for name, one in found.items() if one.group == group} for group in GROUPS))


def wrong(message: str) -> ServiceError:
    """Returns the error for a plugin that cannot be used as the settings say."""
    return ServiceError(Code.INVALID_ARGUMENT, "INVALID_SETTING", f"--plugins: {message}", field="plugins")


def _plugin(entry: "EntryPoint") -> Plugin:
    package = "an unknown package" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
    return Plugin(entry.name, entry.group, package, entry)
