"""What is known of a service before its processes start. One process finds it out and tells it to another one, which
runs the service without what that took (`services.process.apart`)."""

import msgspec

from sluice_server.engine.config import EngineConfig
from sluice_server.services.config import ServiceConfig
from sluice_server.services.process.model_table import ModelTable


class Prepared(msgspec.Struct, frozen=True):
    """A service that can be started; of a process alone, with `--role`, the settings only.

    Attributes:
        engine, service: the settings.
        table: its models.
        files: the directory or file that says what it serves.
        hint: what follows the line that it serves.
    """

    engine: EngineConfig
    service: ServiceConfig
    table: ModelTable = ModelTable()
    files: str = ""
    hint: str = ""
