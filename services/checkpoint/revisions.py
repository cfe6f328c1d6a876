"""Revisions: what a model is named by, beside what clients call it, and which of them go together. Pure.

A checkpoint's *configuration* (its config, tokenizer and templates) and its *weights* are named by what they hold. A
whole revision is `CONFIGURATION-WEIGHTS`: what engines serve. Gateways, tokenizers and detokenizers read no weights and
serve every revision of their configuration. The commit of a hub names both and is its own configuration.
"""

from collections.abc import Iterable

from sluice_server.services.messages.messages import Role, Visit


def whole(configuration: str, weights: str) -> str:
    """The revision of both."""
    return f"{configuration}-{weights}"


def fits(revision: str, served: str) -> bool:
    """Whether a process that serves `served`, a whole revision or the configuration of several, serves `revision`."""
    return revision == served or revision.startswith(f"{served}-")


def agreed(visits: Iterable[Visit]) -> str | None:
    """The one revision that all these processes serve; None where they differ."""
    of_engines: set[str] = set()
    of_others: set[str] = set()
    for visit in visits:
        (of_engines if visit.role is Role.ENGINE else of_others).add(visit.revision)
    if len(of_engines) != 1:
        return None
    (revision,) = of_engines
    return revision if all(fits(revision, one) for one in of_others) else None
