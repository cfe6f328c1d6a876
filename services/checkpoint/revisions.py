"""Defines revisions: the names of a checkpoint's contents, and which of them are compatible. Pure.

A checkpoint's *configuration* (its config, tokenizer and templates) and its *weights* are each named by their contents.
A whole revision is `CONFIGURATION-WEIGHTS`; engines serve it. Gateways, tokenizers and detokenizers read no weights,
and serve every revision with their configuration. A hub commit names both and is its own configuration.
"""

from collections.abc import Iterable

from sluice_server.services.messages.processes import Role, Visit


def whole(configuration: str, weights: str) -> str:
    """Joins the names of configuration and weights to a whole revision."""
    return f"{configuration}-{weights}"


def fits(revision: str, served: str) -> bool:
    """Returns True if a process that serves `served` (a whole revision or a configuration) also serves `revision`."""
    return revision == served or revision.startswith(f"{served}-")


def agreed(visits: Iterable[Visit]) -> str | None:
    """Returns the revision that all these processes serve; None if they differ."""
    of_engines: set[str] = set()
    of_others: set[str] = set()
    for visit in visits:
        (of_engines if visit.role is Role.ENGINE else of_others).add(visit.revision)
    if len(of_engines) != 1:
        return None
    (revision,) = of_engines
    return revision if all(fits(revision, one) for one in of_others) else None
