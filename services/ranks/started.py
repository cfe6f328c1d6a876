"""Starts the other ranks of a model for a process that has no supervisor: rank 0, which asks for them, as its children.

They end with it. Nothing is started again: with the loss of a rank the group has ended.
"""

import contextlib
import dataclasses
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import Code, RankLost, ServiceError
from sluice_server.engine.parallel.sums import SumsBroken
from sluice_server.services.config import WORKER, ServiceConfig, to_environment
from sluice_server.services.messages.processes import Role
from sluice_server.services.process.supervised import GROUP_EPOCH, SUPERVISOR_PID
from sluice_server.services.ranks.leader import RankGroup, open_group

COMMAND = (sys.executable, "-m", "sluice_server", "serve")
LEAVE_S = 5.0  # that a rank gets to end when its group does
LEADER = f"{Role.ENGINE}-0"


class StartedRanks:
    """The processes of the ranks other than 0."""

    def __init__(self, engine: EngineConfig, service: ServiceConfig, folder: Path) -> None:
        """Starts them, with their inboxes in `folder`."""
        names = [LEADER, *(f"{WORKER}-0-{rank}" for rank in range(1, engine.num_ranks))]
        peers = ",".join(f"{name}=ipc://{folder}/{name}" for name in names)
        self.leader = dataclasses.replace(service, role=Role.ENGINE, process_id=LEADER, rank_peers=peers)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for name in names[1:]:
            own = dataclasses.replace(self.leader, role=WORKER, process_id=name, log_level="warning")
            settings = os.environ | to_environment(engine, own) | _tied()
            # In a session of its own: Ctrl-C is for rank 0, which may go on.
            self._processes[name] = subprocess.Popen(
                COMMAND, env=settings, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def check(self) -> None:
        """Raises RankLost if one has ended."""
        for name, process in self._processes.items():
            if process.poll() is not None:
                raise RankLost(f"{name} has ended with status {process.returncode}: what it says is above")

    def leave(self) -> None:
        """Asks them to end; those that save their parts of the cache do so once rank 0 has closed its connections."""
        for process in self._processes.values():
            process.terminate()

    def end(self) -> None:
        """Waits until they have ended. Those that do not are killed."""
        for process in self._processes.values():
            try:
                process.wait(LEAVE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def started(engine: EngineConfig, service: ServiceConfig, configuration: str) -> Iterator[RankGroup]:
    """Runs the other ranks within the block; this process is rank 0. Raises ServiceError, saying what is wrong, if one
    cannot join, also while the block loads its part of the model."""
    with contextlib.ExitStack() as closing:
        folder = closing.enter_context(tempfile.TemporaryDirectory(prefix="sluice-ranks-"))  # of mode 0700
        ranks = StartedRanks(engine, service, Path(folder))
        closing.callback(ranks.end)
        try:
            group = open_group(engine, ranks.leader, LEADER, configuration, ranks.check)
            closing.callback(group.close)
            closing.callback(ranks.leave)
            group.depth = 0  # nothing may be under way between two calls of this process's owner
            yield group
        except (RankLost, SumsBroken) as error:
            raise ServiceError(Code.UNAVAILABLE, "RANK_LOST", f"a rank of the model ended: {error}") from error


def _tied() -> dict[str, str]:
    """Returns what has a child end when this process dies, in whatever way. The kernel looks at the thread that starts
    it, so only the main one may say so; else a child ends once its connection is lost."""
    tied = {GROUP_EPOCH: ""}  # rank 0 draws one
    if threading.current_thread() is threading.main_thread():
        tied[SUPERVISOR_PID] = str(os.getpid())
    return tied
