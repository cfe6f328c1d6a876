"""A model that is larger than the limit of its control group: it computes with its layers' weights in a file, and the
same tokens; without that the kernel kills the process.

Needs root and control groups that can be made (version 1 or 2).
"""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from tests.oracle.checkpoints import Shape, make_checkpoint
from tests.system.test_system_memory import MIB, Group, group

SHAPE = Shape(hidden=1024, layers=14, heads=8, kv_heads=4, head_dim=128, intermediate=4096, spread=0.05)
LIMIT = 800 * MIB  # the layers take 840 MiB of float32, a process with torch some 300
PROGRAM = """
import sys
from pathlib import Path
from sluice_server.engine.build import build_engine
from sluice_server.engine.config import EngineConfig
from sluice_server.engine.models.config import read_config
from sluice_server.engine.models.limits import limits_of
from sluice_server.engine.request import EngineRequest, SamplingParams
directory, size = Path(sys.argv[1]), int(sys.argv[2])
config = EngineConfig(dtype="float32", threads=1, kv_cache_tokens=512, max_num_seqs=2, weights_offload_bytes=size)
model = read_config(directory)
built = build_engine(config, model, directory, limits_of(config, model, 1 << 20))
engine = built.engine
engine.add(EngineRequest("a", tuple(range(3, 90)), SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)))
while engine.has_work:
    print(*[token for event in engine.step().sampled for token in event.token_ids])
for name in sys.argv[3:]:
    for line in Path(name).read_text().splitlines():
        if line.split()[0] in ("active_file", "total_active_file"):
            print(line.split()[1])
            break
built.close()
"""

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def tokens_of(directory: Path, size: int, own: Group | None = None, *more: str) -> tuple[int, list[str]]:
    """How a process ended, and what it generated; behind that, of the files `more`, what counts as memory in use."""
    inside = () if own is None else ("/bin/sh", "-c", f'echo $$ > {own.path}/cgroup.procs; exec "$0" "$@"')
    command = [*inside, sys.executable, "-c", PROGRAM, str(directory), str(size), *more]
    found = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    return found.returncode, found.stdout.split()


def test_a_model_larger_than_the_group_is_served_from_a_file(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, SHAPE)
    status, wanted = tokens_of(directory, 0)
    assert status == 0 and len(wanted) == 24
    with group() as own:
        own.hold_to(LIMIT)
        assert tokens_of(directory, 800 * MIB, own) == (0, wanted) and own.num_kills == 0
        assert tokens_of(directory, 0, own) == (-9, []) and own.num_kills > 0


def test_what_the_system_keeps_of_the_file_is_not_memory_in_use(tmp_path: Path) -> None:
    """After 24 steps, each of which reads all of it."""
    directory, size = make_checkpoint(tmp_path, dataclasses.replace(SHAPE, hidden=512, intermediate=1024)), 120 * MIB
    with group() as own:
        status, found = tokens_of(directory, size, own, str(own.path / "memory.stat"))
    assert status == 0 and len(found) == 25 and int(found[-1]) < size // 3
