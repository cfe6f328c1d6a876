"""Python client of sluice. `Client` blocks, `AsyncClient` is for asyncio; `sluice.v1` holds the generated stubs.

Names are imported on first use, so that a program which needs only the stubs, such as a server, imports nothing else.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sluice.aio.client import AsyncClient as AsyncClient
    from sluice.client import Client as Client
    from sluice.completion import Completion as Completion
    from sluice.embeddings import Embeddings as Embeddings
    from sluice.embeddings import EmbedOptions as EmbedOptions
    from sluice.errors import Aborted as Aborted
    from sluice.errors import AlreadyExists as AlreadyExists
    from sluice.errors import Cancelled as Cancelled
    from sluice.errors import DeadlineExceeded as DeadlineExceeded
    from sluice.errors import FailedPrecondition as FailedPrecondition
    from sluice.errors import InternalError as InternalError
    from sluice.errors import InvalidArgument as InvalidArgument
    from sluice.errors import NotFound as NotFound
    from sluice.errors import OutOfRange as OutOfRange
    from sluice.errors import PermissionDenied as PermissionDenied
    from sluice.errors import ResourceExhausted as ResourceExhausted
    from sluice.errors import SluiceError as SluiceError
    from sluice.errors import Unauthenticated as Unauthenticated
    from sluice.errors import Unavailable as Unavailable
    from sluice.errors import Unimplemented as Unimplemented
    from sluice.ranking import Classifications as Classifications
    from sluice.ranking import ClassifyOptions as ClassifyOptions
    from sluice.ranking import Ranking as Ranking
    from sluice.ranking import RerankOptions as RerankOptions
    from sluice.ranking import ScoreOptions as ScoreOptions
    from sluice.ranking import Scores as Scores
    from sluice.retry import NEVER as NEVER
    from sluice.retry import RetryPolicy as RetryPolicy
    from sluice.settings import Tls as Tls
    from sluice.spec import GenerateOptions as GenerateOptions
    from sluice.spec import Prompt as Prompt
    from sluice.spec import chat as chat
    from sluice.tokens import TokenSpan as TokenSpan

_ERRORS = (
    "Aborted",
    "AlreadyExists",
    "Cancelled",
    "DeadlineExceeded",
    "FailedPrecondition",
    "InternalError",
    "InvalidArgument",
    "NotFound",
    "OutOfRange",
    "PermissionDenied",
    "ResourceExhausted",
    "SluiceError",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
)
_RANKING = ("Classifications", "ClassifyOptions", "Ranking", "RerankOptions", "ScoreOptions", "Scores")
_HOMES = {
    "AsyncClient": "sluice.aio.client",
    "Client": "sluice.client",
    "Completion": "sluice.completion",
    "EmbedOptions": "sluice.embeddings",
    "Embeddings": "sluice.embeddings",
    "GenerateOptions": "sluice.spec",
    "NEVER": "sluice.retry",
    "Prompt": "sluice.spec",
    "RetryPolicy": "sluice.retry",
    "Tls": "sluice.settings",
    "TokenSpan": "sluice.tokens",
    "chat": "sluice.spec",
    **dict.fromkeys(_ERRORS, "sluice.errors"),
    **dict.fromkeys(_RANKING, "sluice.ranking"),
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    """Imports a public name from its module (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'sluice' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """Returns the public names, as completion in a terminal and an editor shows them."""
    return [*globals(), *__all__]
