"""One-sided reads of another host's memory by NIXL, as far as cache blocks need them; the package is optional.

NIXL's UCX listens at a port of its own and knows no keys: whoever reaches it can read the memory of this process, and
write to it. So the network between the hosts must be the ring's alone.
"""

import contextlib
import importlib
import logging
import secrets
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from sluice_server.services.transfer.network_frames import MAX_AGENT_BYTES

MEMORY = "DRAM"
PROGRESS_US = 100  # between two turns of NIXL's thread; it spins without, and takes a core also where nothing is read
R = TypeVar("R")


class TransferFailed(Exception):
    """A transfer could not begin, or has failed: the peer has ended, or is not reached."""


class Agent(Protocol):
    """This process's end. Used by one thread."""

    def join(self, metadata: bytes) -> str:
        """Knows another end from now on; returns its name. Raises TransferFailed."""

    def leave(self, peer: str) -> None:
        """Forgets another end. Raises TransferFailed."""

    def begin(self, peer: str, pairs: Sequence[tuple[int, int]], size: int) -> object:
        """Begins to read `size` bytes for each pair of own and other address; returns the transfer. Raises
        TransferFailed."""

    def is_done(self, transfer: object) -> bool:
        """Whether all of a transfer has come. Raises TransferFailed if it has failed, and writes nothing any more."""

    def release(self, transfer: object) -> None:
        """Lets go of a transfer that is done or has failed; one that is under way would go on writing. Raises
        TransferFailed."""


class NixlAgent:
    """NIXL's agent, with its UCX backend.

    Attributes:
        metadata: what others need to read here.
    """

    def __init__(self, name: str, regions: Sequence[tuple[int, int]]) -> None:
        """`regions`: address and size of what others read, and of what is read into. Raises ImportError without NIXL,
        and OSError if it cannot be used."""
        api = importlib.import_module("nixl_cu12._api")  # which needs no CUDA; the package `nixl` would bring another
        logging.getLogger("nixl").setLevel(logging.WARNING)  # it writes to standard output
        try:
            self._agent: Any = _pausing_agent(api, f"{name}-{secrets.token_hex(8)}")
            self._agent.create_backend("UCX")
            for address, size in regions:
                self._agent.register_memory(self._agent.get_reg_descs([(address, size, 0, "")], MEMORY))
            self.metadata: bytes = self._agent.get_agent_metadata()
        except Exception as error:
            raise OSError(f"NIXL cannot be used ({error})") from error
        if len(self.metadata) > MAX_AGENT_BYTES:
            raise OSError(f"NIXL's metadata has {len(self.metadata)} bytes: choose fewer devices by UCX_NET_DEVICES")

    def join(self, metadata: bytes) -> str:
        """Implements `Agent.join`."""
        name = _tried(self._agent.add_remote_agent, metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def leave(self, peer: str) -> None:
        """Implements `Agent.leave`."""
        _tried(self._agent.remove_remote_agent, peer)

    def begin(self, peer: str, pairs: Sequence[tuple[int, int]], size: int) -> object:
        """Implements `Agent.begin`."""
        own, other = ([(pair[at], size, 0) for pair in pairs] for at in range(2))
        described = (_tried(self._agent.get_xfer_descs, one, MEMORY) for one in (own, other))
        transfer: object = _tried(self._agent.initialize_xfer, "READ", *described, peer)
        with contextlib.suppress(TransferFailed):  # it may write by now: `is_done` tells how it ended
            _tried(self._agent.transfer, transfer)
        return transfer

    def is_done(self, transfer: object) -> bool:
        """Implements `Agent.is_done`."""
        state = _tried(self._agent.check_xfer_state, transfer)
        if state not in ("DONE", "PROC"):
            raise TransferFailed(str(state))
        return bool(state == "DONE")

    def release(self, transfer: object) -> None:
        """Implements `Agent.release`."""
        _tried(self._agent.release_xfer_handle, transfer)


def _pausing_agent(api: Any, name: str) -> Any:  # noqa: ANN401 # a package that may be missing
    """Returns an agent whose thread pauses between its turns, which no setting of the package's own agent does."""
    agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
    config = api.nixlBind.nixlAgentConfig()
    config.useProgThread, config.pthrDelay = True, PROGRESS_US
    agent.agent = api.nixlBind.nixlAgent(name, config)
    return agent


def _tried(call: Callable[..., R], *about: object) -> R:
    """Returns what a call of NIXL's does; its exceptions have no class in common."""
    try:
        return call(*about)
    except Exception as error:
        raise TransferFailed(str(error) or type(error).__name__) from error
