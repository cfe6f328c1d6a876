"""A gateway that keeps a little of every request it has closed: the control that a check for leaks must catch."""

import typer

from engine.config import EngineConfig
from services.cli.options import takes_settings
from services.config import ServiceConfig
from services.gateway.requests.desk import Desk
from services.gateway.requests.open_requests import OpenRequest
from services.roles import run_role

LEAK_BYTES = 1024


@takes_settings
def main(engine: EngineConfig, service: ServiceConfig) -> None:
    """Run one gateway of a ring, leaking."""
    kept: list[bytes] = []
    close = Desk.close

    def close_and_keep(desk: Desk, request: OpenRequest) -> None:
        kept.append(request.envelope.request_id.encode() * (LEAK_BYTES // 32))
        close(desk, request)

    Desk.close = close_and_keep  # type: ignore[assignment,method-assign] # the fault itself
    raise typer.Exit(run_role(engine, service))


if __name__ == "__main__":
    typer.run(main)
