"""Ranks of one engine on two hosts: addresses of the loopback's network, or network namespaces, stand for hosts."""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import psutil

from sluice_server.services.process import heartbeat
from sluice_server.services.ring.keys import make_keys
from tests.system.service import Service, serve, wait_until

OPTIONS = ("--dtype", "float32", "--max-restarts", "1000", "--max-num-batched-tokens", "64", "--allow-shared-cores")
RUNS_WITHIN_S = 10.0
AGAIN = 'trap "exit 0" TERM; while :; do "$@" & wait $!; done'


class Workers:
    """The ranks of another host. What an orchestrator does for them: one that ends is started again, and one that its
    heartbeats say is stuck is ended."""

    def __init__(self, beats: Path) -> None:
        self._beats = beats
        self._loops: dict[str, subprocess.Popen[bytes]] = {}
        self._over = threading.Event()
        self._watching = threading.Thread(target=self._watch, daemon=True)

    def start(self, name: str, command: Sequence[str], log: IO[str] | None) -> None:
        """Runs a rank by this command."""
        beats = ("--heartbeat-dir", str(self._beats))
        loop = subprocess.Popen(["sh", "-c", AGAIN, "sh", *command, *beats], stderr=log, start_new_session=True)
        self._loops[name] = loop
        if not self._watching.is_alive():
            self._watching.start()

    def find(self, name: str) -> psutil.Process | None:
        """The process of a rank, by its title; None while there is none."""
        loop = self._loops.get(name)
        for child in () if loop is None else psutil.Process(loop.pid).children():
            with contextlib.suppress(psutil.Error):
                if " ".join(child.cmdline()).removeprefix("sluice: ").strip() == name:
                    return child
        return None

    def end(self) -> None:
        """Ends all of them."""
        self._over.set()
        for loop in self._loops.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(loop.pid, signal.SIGKILL)
            loop.wait()

    def _watch(self) -> None:
        while not self._over.wait(1.0):
            for name in list(self._loops):
                sign, found = heartbeat.read(self._beats, name), self.find(name)
                if sign is not None and found is not None and sign.is_stuck(time.monotonic()):
                    with contextlib.suppress(psutil.Error):
                        found.kill()


class Hosts:
    """A service on one host, and workers on another."""

    def __init__(self, service: Service, workers: Workers, peers: dict[str, str]) -> None:
        self.service = service
        self.peers = peers
        self._workers = workers

    def worker(self, name: str) -> psutil.Process | None:
        """The process of a rank of the other host; None while there is none."""
        return self._workers.find(name)


def serve_command(role: str, name: str, options: Sequence[str]) -> list[str]:
    """The command of one rank by hand."""
    own = ("--role", role, "--process-id", name, "--log-level", "warning", "--threads", "1")
    return [sys.executable, "-m", "sluice_server", "serve", *own, *options]


@contextlib.contextmanager
def two_hosts(
    options: Sequence[str],
    peers: dict[str, str],
    listen: str,
    within: tuple[Sequence[str], Sequence[str]] = ((), ()),
    log: IO[str] | None = None,
) -> Iterator[Hosts]:
    """Runs a supervisor on the host of rank 0 and a worker for each rank on the other one, until the block ends."""
    own_host = next(iter(peers.values())).rpartition(":")[0]
    with contextlib.ExitStack() as closing:
        keys = Path(closing.enter_context(tempfile.TemporaryDirectory()))
        make_keys(keys, peers)
        table = ",".join(f"{name}={address}" for name, address in peers.items())
        both = (*options, "--rank-peers", table, "--ring-keys", str(keys))
        workers = Workers(Path(closing.enter_context(tempfile.TemporaryDirectory())))
        closing.callback(workers.end)
        for name, address in peers.items():
            if address.rpartition(":")[0] != own_host:
                workers.start(name, [*within[1], *serve_command("worker", name, both)], log)
        service = closing.enter_context(serve(*both, "--listen", listen, within=within[0], log=log))
        yield Hosts(service, workers, peers)


class Namespaces:
    """Two network namespaces with one link."""

    def __init__(self) -> None:
        mark = secrets.token_hex(3)
        self.names = (f"sluice-a-{mark}", f"sluice-b-{mark}")
        self.addresses = ("198.51.100.1", "198.51.100.2")
        self.links = (f"va{mark}", f"vb{mark}")

    def within(self, at: int) -> list[str]:
        """What runs a command in one of them."""
        return ["ip", "netns", "exec", self.names[at]]

    def set_link(self, state: str) -> None:
        """Cuts the link ("down"), or mends it ("up")."""
        ip("-n", self.names[0], "link", "set", self.links[0], state)

    def make(self) -> None:
        """Makes both, and waits until the link runs: the kernel notices its carrier up to a second later, and programs
        may leave out what does not run. Raises subprocess.CalledProcessError where that is not allowed."""
        for name in self.names:
            ip("netns", "add", name)
        ip(
            "link",
            "add",
            self.links[0],
            "netns",
            self.names[0],
            "type",
            "veth",
            "peer",
            self.links[1],
            "netns",
            self.names[1],
        )
        for name, link, address in zip(self.names, self.links, self.addresses, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "link", "set", "lo", "up")
        wait_until(self._runs, RUNS_WITHIN_S, "the link between the namespaces does not run")

    def _runs(self) -> bool:
        """Whether both ends of the link run."""
        shown = (ip("-n", name, "link", "show", link) for name, link in zip(self.names, self.links, strict=True))
        return all("state UP" in one for one in shown)

    def remove(self) -> None:
        """Removes both, as far as they were made."""
        for name in self.names:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)


def ip(*words: str) -> str:
    """Runs `ip`, and returns what it says."""
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout
