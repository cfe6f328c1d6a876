"""What a supervisor tells its gateways of models, and how long it waits before it looks at them again."""

import sys
from pathlib import Path

from sluice_server.services.messages.processes import Role
from sluice_server.services.process.model_table import LaneEntry, LaneState, ModelTable, read_table
from sluice_server.services.supervisor.children import Child
from sluice_server.services.supervisor.directory import RunDirectory
from sluice_server.services.supervisor.lanes import Lanes
from sluice_server.services.supervisor.moving import Moving
from sluice_server.services.supervisor.restarts import Restarts
from sluice_server.services.supervisor.room import Budget
from sluice_server.services.supervisor.supervisor import POLL_S, Supervisor

# A gateway that says that the model serves, waits for the word that the table has changed, and stops the service.
GATEWAY = """
import os, signal
from sluice_server.services.process.supervised import TABLE_CHANGED, say_lanes, say_ready
signal.pthread_sigmask(signal.SIG_BLOCK, [TABLE_CHANGED, signal.SIGTERM])
say_ready("gateway-0", "127.0.0.1:7")
say_lanes("gateway-0", {"m0"}, (), (), ())
if signal.sigtimedwait([TABLE_CHANGED], 60) is not None:
    open(os.path.join(os.environ["RUNS"], "told"), "w").close()
os.kill(os.getppid(), signal.SIGTERM)
signal.sigwait([signal.SIGTERM])
"""


def supervisor_of(directory: Path) -> tuple[Supervisor, Lanes]:
    directory.chmod(0o700)
    table = ModelTable({"m0": LaneEntry("a", "/a")})
    lanes = Lanes(lambda lane, entry: [], directory, lambda line: None, 1, table, Budget(1 << 40))
    children = [Child("gateway-0", Role.GATEWAY, {"RUNS": str(directory)})]
    command, restarts = (sys.executable, "-c", GATEWAY), Restarts(0)
    moving = Moving(lanes=lanes)
    return Supervisor(children, command, RunDirectory(directory), restarts, lambda line: None, moving), lanes


def test_gateways_are_told_when_the_table_of_models_has_changed(tmp_path: Path) -> None:
    supervisor, _ = supervisor_of(tmp_path)
    assert supervisor.run(lambda address: None, grace_s=10.0) == 0
    assert (tmp_path / "told").exists() and read_table(tmp_path).lanes["m0"].state is LaneState.READY


def test_it_waits_no_longer_than_until_a_turn_ends(tmp_path: Path) -> None:
    supervisor, lanes = supervisor_of(tmp_path)
    assert supervisor._wait_s() == POLL_S
    lanes.due_s = lambda now_s: now_s + POLL_S / 4  # type: ignore[method-assign]
    assert 0 < supervisor._wait_s() < POLL_S / 2
    supervisor._close_pipe()
    assert supervisor._commands is not None
    supervisor._commands.close()
