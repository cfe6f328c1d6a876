"""Places a ring's processes on the machines of a Ray cluster, and has them kept alive there. The only module that
imports ray.

Ray carries the processes' settings and public keys, and their state: no prompt, token or secret key. A process that
ends is started again by its keeper, an actor. A keeper that is lost is made again in its place; if that is another
machine, the ring is formed anew, as every process is told the addresses of the others at its start.
"""

import logging
import os
from collections.abc import Mapping

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from sluice_server.engine.errors import ServiceError
from sluice_server.services.config import bad_setting
from sluice_server.services.launch.cluster import ClusterFile, environment, members_of
from sluice_server.services.launch.keeper import Keeper
from sluice_server.services.messages.processes import Role

logger = logging.getLogger(__name__)
PLACE_S = 60.0  # until resources must be found
ANSWER_S = 10.0  # until a keeper must answer
NAMESPACE = "sluice"


class RayKeeper(Keeper):
    """A keeper that says where it is."""

    def host(self) -> str:
        """Returns the address of its machine."""
        return str(ray.util.get_node_ip_address())


class RayRing:
    """The processes of one ring on a Ray cluster."""

    def __init__(self, cluster: ClusterFile) -> None:
        self._cluster = cluster
        self._members = {one.process_id: one for one in members_of(cluster)}
        self._groups: dict[Role, PlacementGroup] = {}
        self._keepers: dict[str, ray.actor.ActorHandle] = {}
        self._hosts: dict[str, str] = {}
        self._keys: dict[str, str] = {}

    def up(self) -> None:
        """Connects, places the processes and starts them. Raises ServiceError if that cannot be."""
        _connect(self._cluster)
        for role in (Role.GATEWAY, Role.TOKENIZER, Role.ENGINE, Role.DETOKENIZER):
            self._groups[role] = self._placed(role)
        for name in self._members:
            self._keep(name)
        self._start(list(self._members))

    @property
    def hosts(self) -> Mapping[str, str]:
        """Address of the machine of each process, by its id."""
        return self._hosts

    def look(self) -> dict[str, dict[str, str | int]]:
        """Returns the state of each process. Makes keepers again that are lost."""
        asked = {name: keeper.state.remote() for name, keeper in self._keepers.items()}
        states, lost = {}, []
        for name, answer in asked.items():
            try:
                states[name] = ray.get(answer, timeout=ANSWER_S)
            except (RayError, GetTimeoutError) as error:
                logger.warning("the keeper of %s is lost (%s); making another", name, type(error).__name__)
                lost.append(name)
        if lost:
            self._replace(lost)
        return states

    def down(self, grace_s: float) -> None:
        """Ends all processes, and gives back what they took."""
        if not ray.is_initialized():
            return
        ends = [keeper.stop.remote(grace_s) for keeper in self._keepers.values()]
        _wait(ends, grace_s + 2 * ANSWER_S)
        closed = [keeper.close.remote() for keeper in self._keepers.values()]
        _wait(closed, ANSWER_S)
        for group in self._groups.values():
            remove_placement_group(group)
        ray.shutdown()

    def _placed(self, role: Role) -> PlacementGroup:
        """Reserves what a role's processes take, each on a machine of its own where there are enough. All that one
        engine takes is on one machine, its ranks too."""
        shape = self._cluster.roles.of(role)
        bundle = {"CPU": shape.cpus} | ({"GPU": shape.gpus} if shape.gpus else {})
        group = placement_group([bundle] * shape.replicas, strategy="SPREAD", name=f"{self._cluster.name}-{role}")
        try:
            ray.get(group.ready(), timeout=PLACE_S)
        except GetTimeoutError:
            have = {name: num for name, num in ray.available_resources().items() if name in bundle}
            remove_placement_group(group)
            text = f"Ray has no place for {shape.replicas} of {role}, each with {bundle}; free are {have}"
            raise bad_setting("file", f"{text}: lower roles.{role}, or add machines") from None
        return group

    def _keep(self, name: str) -> None:
        member = self._members[name]
        number = int(name.rpartition("-")[2])
        place = PlacementGroupSchedulingStrategy(self._groups[member.role], placement_group_bundle_index=number)
        options = {"num_cpus": member.cpus, "num_gpus": member.gpus, "scheduling_strategy": place}
        actor = ray.remote(RayKeeper).options(max_restarts=0, **options)
        self._keepers[name] = actor.remote(self._cluster.name, name)

    def _meet(self, names: list[str]) -> None:
        """Learns the machine and the public key of keepers."""
        hosts = {name: self._keepers[name].host.remote() for name in names}
        keys = {name: self._keepers[name].prepare.remote() for name in names}
        try:
            self._hosts |= {name: ray.get(answer, timeout=PLACE_S) for name, answer in hosts.items()}
            self._keys |= {name: ray.get(answer, timeout=ANSWER_S) for name, answer in keys.items()}
        except RayError as error:
            reason = " ".join(str(error).strip().splitlines()[-1:])
            raise bad_setting("file", f"a process cannot be kept on its machine: {reason}") from None

    def _start(self, names: list[str]) -> None:
        self._meet(names)
        for name in names:
            settings = environment(self._cluster, self._members[name], self._hosts)
            ray.get(self._keepers[name].start.remote(settings, self._keys), timeout=PLACE_S)

    def _replace(self, names: list[str]) -> None:
        before = dict(self._hosts), dict(self._keys)
        for name in names:
            ray.kill(self._keepers[name])
            self._keep(name)
        try:
            self._meet(names)
        except ServiceError as error:
            logger.warning("%s; trying again", error.message)
            return
        same = (self._hosts, self._keys) == before
        if not same:
            logger.warning("%s moved to another machine: the ring is formed anew", ", ".join(names))
        self._start(names if same else list(self._members))


def _wait(answers: list["ray.ObjectRef[None]"], timeout_s: float) -> None:
    """Waits for calls that return nothing; what is lost does not answer."""
    if answers:
        ray.wait(answers, num_returns=len(answers), timeout=timeout_s)


def _connect(cluster: ClusterFile) -> None:
    if os.environ.get("RAY_AUTH_MODE") != "token":
        text = (
            "Ray without authentication runs what anybody on its network sends: start its head and machines, and this"
        )
        raise bad_setting("file", f"{text} command, with RAY_AUTH_MODE=token and the same RAY_AUTH_TOKEN")
    try:
        ray.init(address=cluster.address, namespace=NAMESPACE, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise bad_setting("file", f"address {cluster.address}: no Ray cluster answers ({error})") from None
