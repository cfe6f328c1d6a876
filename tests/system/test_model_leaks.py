"""Two models that replace each other again and again, in real processes: nothing is left of those that went."""

import statistics
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from sluice.v1 import control_pb2, control_pb2_grpc

from tests.system.service import Service, serve, wait_until
from tests.system.test_system_models import CACHE, answered, checkpoints, states

LOADS = 200
SETTLED = 40  # loads until allocators have what they keep
MOST_BYTES = 6 << 20  # of growth over 120 loads: 50 KiB each
MOST_FILES = 8  # likewise: gRPC takes a pair more now and then, and a leak would be of one each at least


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_loads_and_unloads_leave_neither_memory_nor_descriptors_nor_files(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("run")  # a short path, as sockets need
    checkpoints(tmp_path, "v0", "v1")
    file = tmp_path / "models.toml"
    file.write_text(f'default = "chat"\n[models.v0]\nsource = "{tmp_path}/v0"\nalias = "chat"\n')
    options = "--models", str(file), "--models-dir", str(tmp_path), "--gateways", "2", *CACHE
    own = {"TMPDIR": str(folder), "XDG_RUNTIME_DIR": ""}
    with serve(*options, environment=own) as service, service.control() as control:
        wait_until(lambda: set(states(control).values()) == {"READY"}, 90, "the first model serves")
        run = next(folder.glob("sluice-run-*"))
        watched, num = dict(lasting(service)), num_files(run)
        memory, files = dict[str, list[int]](), dict[str, list[int]]()
        for at in range(1, LOADS + 1):
            swap(service, control, f"v{at % 2}", f"v{(at + 1) % 2}")
            for name, process in watched.items():
                memory.setdefault(name, []).append(process.memory_info().rss)
                files.setdefault(name, []).append(process.num_fds())
            wait_until(lambda: num_files(run) == num, 20, f"the files of other models went: {sorted(run.iterdir())}")
        assert dict(lasting(service)) == watched, "a process was started anew"
    for name in watched:
        early, late = memory[name][SETTLED : 2 * SETTLED], memory[name][-SETTLED:]
        grown = statistics.median(late) - statistics.median(early)
        print(f"{name}: {min(early) >> 10} to {max(late) >> 10} KiB, {files[name][SETTLED]} to {files[name][-1]} files")
        assert grown < MOST_BYTES, f"{name} has grown by {int(grown) >> 10} KiB: {memory[name][::SETTLED]}"
        assert files[name][-1] - files[name][SETTLED] < MOST_FILES, f"{name}: {files[name][::SETTLED]}"


def num_files(folder: Path) -> int:
    """The files in a run directory."""
    return sum(1 for _ in folder.iterdir())


def lasting(service: Service) -> Iterator[tuple[str, psutil.Process]]:
    """The processes of a service that belong to no model."""
    yield "supervisor", psutil.Process(service.process.pid)
    yield from service.templates().items()
    yield from ((name, process) for name, process in service.children().items() if name.startswith("gateway"))


def swap(service: Service, control: control_pb2_grpc.ControlServiceStub, new: str, old: str) -> None:
    """Loads a model beside another one, moves the alias, unloads the other one, and waits until its processes ended."""
    leaving = {name for name in service.children() if not name.startswith("gateway")}
    control.LoadModel(control_pb2.LoadModelRequest(model=new), timeout=120)
    control.SetAlias(control_pb2.SetAliasRequest(alias="chat", targets=[control_pb2.AliasTarget(model=new)]))
    assert answered(service, "chat", 2) in (new, old)  # another gateway may follow a moment later
    control.UnloadModel(control_pb2.UnloadModelRequest(model=old), timeout=120)
    wait_until(lambda: not leaving & service.children().keys(), 60, f"{old} is gone")
