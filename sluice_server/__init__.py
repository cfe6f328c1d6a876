"""The import namespace of everything that is installed; `sluice` is that of the Python SDK.

Its packages are links to the folders of the same names beside this one. In an sdist and in a wheel they are folders.
The names of the offline API are imported when they are first used, so that `import sluice_server` alone loads neither
torch nor numpy.
"""

import importlib
from typing import TYPE_CHECKING

from sluice_server.version import VERSION

if TYPE_CHECKING:
    from sluice_server.services.offline import LLM as LLM
    from sluice_server.services.offline import ClassificationOutput as ClassificationOutput
    from sluice_server.services.offline import CompletionOutput as CompletionOutput
    from sluice_server.services.offline import EmbeddingOutput as EmbeddingOutput
    from sluice_server.services.offline import PromptError as PromptError
    from sluice_server.services.offline import RankedOutput as RankedOutput
    from sluice_server.services.offline import RequestOutput as RequestOutput
    from sluice_server.services.offline import SamplingParams as SamplingParams

__version__ = VERSION
__all__ = [
    "LLM",
    "ClassificationOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "PromptError",
    "RankedOutput",
    "RequestOutput",
    "SamplingParams",
]


def __getattr__(name: str) -> object:
    """Import a public name from `sluice_server.services.offline` (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module 'sluice_server' has no attribute {name!r}")
    return getattr(importlib.import_module("sluice_server.services.offline"), name)
