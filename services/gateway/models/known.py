"""What a gateway knows of the models of its service, and has done about them by the supervisor."""

import asyncio
from typing import Protocol

from sluice_server.engine.errors import unsupported
from sluice_server.services.process.model_commands import Command, LoadLane
from sluice_server.services.process.model_table import ModelTable
from sluice_server.services.process.models_file import NamedModel

ALONE = "models are loaded and named under a supervisor only: start the service without --role"


class News:
    """Tells waiting tasks that something has changed.

    Attributes:
        number: of changes so far.
    """

    def __init__(self) -> None:
        self.number = 0
        self._event = asyncio.Event()

    def tell(self) -> None:
        """Notes a change."""
        self.number += 1
        self._event.set()
        self._event = asyncio.Event()

    async def after(self, number: int) -> None:
        """Waits until there were more changes than `number`."""
        if self.number == number:
            await self._event.wait()


class KnownModels(Protocol):
    """The models of a service.

    Attributes:
        news: told whenever the table, or what serves here, has changed.
    """

    news: News

    @property
    def table(self) -> ModelTable:
        """The models as the supervisor says."""

    @property
    def models_dir(self) -> str:
        """The directory below which models are found; "" for none."""

    def declared(self, model: str) -> NamedModel | None:
        """Returns what the file of models says of one. Raises ServiceError for a file that cannot be used."""

    async def loading_of(self, named: NamedModel) -> LoadLane:
        """Returns the command that loads a model, with the memory that it may take. Raises ServiceError naming what is
        wrong with its files or settings."""

    async def ask(self, command: Command) -> str:
        """Has the supervisor carry out a command; returns the lane that it is about. Raises ServiceError."""


class OneModel:
    """The models of a gateway without a supervisor: what it serves, and no more."""

    def __init__(self) -> None:
        self.news = News()
        self.table = ModelTable()
        self.models_dir = ""

    def declared(self, model: str) -> NamedModel | None:
        """Returns None."""
        return None

    async def loading_of(self, named: NamedModel) -> LoadLane:
        """Raises ServiceError."""
        raise unsupported("models", ALONE)

    async def ask(self, command: Command) -> str:
        """Raises ServiceError."""
        raise unsupported("models", ALONE)
