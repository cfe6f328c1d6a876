"""The file of `sluice ray up`: which processes a ring has, what each takes, and what all are told. Pure but for reading
the file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from sluice_server.services.config import ENV_PREFIX, bad_setting
from sluice_server.services.messages.processes import Role

FIRST_PORT = 7000
MAX_REPLICAS = 16
Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_REPLICAS)]
# What the launcher decides; `serve` of the file may not set it.
DECIDED = frozenset({"role", "process_id", "inbox", "ring_keys", "heartbeat_dir", "config", "engines_file"})
DECIDED |= {f"{role}_peers" for role in Role}


class RoleShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The processes of one role, and what each of them takes of its machine."""

    replicas: Count = 1
    cpus: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    gpus: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class Roles(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The roles of a ring."""

    gateway: RoleShape = RoleShape()
    tokenizer: RoleShape = RoleShape()
    engine: RoleShape = RoleShape(cpus=2.0)
    detokenizer: RoleShape = RoleShape()

    def of(self, role: Role) -> RoleShape:
        """Returns the shape of a role."""
        shapes = {
            Role.GATEWAY: self.gateway,
            Role.TOKENIZER: self.tokenizer,
            Role.ENGINE: self.engine,
            Role.DETOKENIZER: self.detokenizer,
        }
        return shapes[role]


class ClusterFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file.

    Attributes:
        name: of the ring, unique within the cluster.
        address: of Ray's head, host:port; auto: the one that runs on this machine.
        port: the first TCP port of the ring's processes; each role has its own range of ports behind it.
        roles: their processes.
        serve: options of `sluice serve` for all of them.
    """

    name: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9-]{0,40}$")] = "sluice"
    address: str = "auto"
    port: Annotated[int, msgspec.Meta(ge=1024, le=65535 - 4 * MAX_REPLICAS)] = FIRST_PORT
    roles: Roles = Roles()
    serve: dict[str, str | int | float | bool] = {}


class Member(msgspec.Struct, frozen=True):
    """One process of the ring: its id, its role, what it takes, and the port of its inbox."""

    process_id: str
    role: Role
    cpus: float
    gpus: float
    port: int


def read(path: Path, settings: Sequence[str]) -> ClusterFile:
    """Returns the file's contents. `settings`: names of the options of serve. Raises ServiceError naming the file and
    the place at fault."""
    try:
        found = msgspec.yaml.decode(path.read_bytes(), type=ClusterFile)
    except OSError as error:
        raise bad_setting("file", f"cannot read {path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise bad_setting("file", f"{path}: {' '.join(str(error).split())}") from None
    for written in found.serve:
        name = written.replace("-", "_")
        if name in DECIDED:
            raise bad_setting("file", f"{path}: serve.{written} is decided by the launcher: leave it out")
        if name not in settings:
            raise bad_setting("file", f"{path}: serve.{written} is no option of `sluice serve`")
    return found


def members_of(cluster: ClusterFile) -> list[Member]:
    """Returns the processes of the ring, those of a role one after the other."""
    found = []
    for at, role in enumerate((Role.GATEWAY, Role.TOKENIZER, Role.ENGINE, Role.DETOKENIZER)):
        shape = cluster.roles.of(role)
        for number in range(shape.replicas):
            port = cluster.port + at * MAX_REPLICAS + number
            found.append(Member(f"{role}-{number}", role, shape.cpus, shape.gpus, port))
    return found


def environment(cluster: ClusterFile, member: Member, hosts: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of a process. `hosts`: address of the machine of each process, by its id."""
    peers: dict[Role, list[str]] = {role: [] for role in Role}
    for one in members_of(cluster):
        peers[one.role].append(f"{one.process_id}=tcp://{_host(hosts[one.process_id])}:{one.port}")
    found = {name.replace("-", "_"): _text(value) for name, value in cluster.serve.items()}
    found |= {
        "role": str(member.role),
        "process_id": member.process_id,
        "inbox": f"tcp://{_host(hosts[member.process_id])}:{member.port}",
        **{f"{role}_peers": ",".join(each) for role, each in peers.items()},
    }
    return {ENV_PREFIX + name.upper(): value for name, value in found.items()}


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _text(value: str | float | bool) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)
