"""Which network devices UCX takes: those of this host, with a kernel that says what it is told to."""

import os
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from sluice_server.services.transfer import by_nixl, links
from sluice_server.services.transfer.links import ADDRESS_OF, FLAGS_OF, left_out, wait_for_device
from tests.faults.hosts import Namespaces, ip

PLACE = "tcp://192.0.2.1:7100"
UP, RUNS = 0x1003, 0x1043


@pytest.fixture
def flags(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, int]:
    """What the kernel says of two devices, of which `link` has the address of the place; both are in `tmp_path`."""
    found, addresses = {"lo": 0x49, "link": RUNS}, {"lo": "127.0.0.1", "link": "192.0.2.1"}

    def asked(what: int, name: str) -> bytes:
        if name not in addresses:
            raise OSError("no address")
        family = struct.pack("HH", socket.AF_INET, 0)
        return {ADDRESS_OF: family + socket.inet_aton(addresses[name]), FLAGS_OF: struct.pack("h", found[name])}[what]

    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "link"), (3, "bare")])
    monkeypatch.setattr(links, "_asked", asked)
    monkeypatch.setattr(links, "DEVICES", tmp_path)
    for name in found:
        (tmp_path / name).mkdir()
    return found


def test_a_device_that_runs_is_taken(flags: dict[str, int]) -> None:
    assert left_out(PLACE) == ""
    wait_for_device(PLACE)


@pytest.mark.parametrize(
    "place", ["tcp://192.0.2.7:7100", "tcp://*:7100", "tcp://[::1]:7100", "tcp://host.example:7100"]
)
def test_a_place_without_a_device_of_this_host_is_let_pass(flags: dict[str, int], place: str) -> None:
    flags["link"] = UP
    assert left_out(place) == ""
    wait_for_device(place)


def test_a_device_that_does_not_run_is_named(flags: dict[str, int]) -> None:
    flags["link"] = UP
    with pytest.raises(OSError, match=r"link, the network device of 192\.0\.2\.1, does not run.*`ip link show link`"):
        wait_for_device(PLACE, 0.0)
    assert left_out("tcp://127.0.0.1:7100") == ""


def test_a_device_of_another_namespace_than_that_of_sys_is_named(flags: dict[str, int], tmp_path: Path) -> None:
    (tmp_path / "link").rmdir()
    with pytest.raises(OSError, match=r"is not in .*: /sys is that of another network namespace.*`ip netns exec`"):
        wait_for_device(PLACE, 0.0)


def test_a_device_that_comes_to_run_is_awaited(flags: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    flags["link"], waits = UP, list[float]()

    def wait(seconds: float) -> None:
        waits.append(seconds)
        flags["link"] = RUNS if len(waits) == 3 else UP

    monkeypatch.setattr(time, "sleep", wait)
    wait_for_device(PLACE, 60.0)
    assert len(waits) == 3


def test_the_loopback_device_of_this_host_is_read() -> None:
    """From the kernel itself: of a device that runs its address is found, and of one that does not it is named."""
    lo = "lo"
    assert links._address(lo) in ("127.0.0.1", "")
    assert links._address("no such") == ""
    runs = struct.unpack_from("h", links._asked(FLAGS_OF, lo))[0] & links.RUNS
    assert bool(left_out("tcp://127.0.0.1:7100")) is (links._address(lo) == "127.0.0.1" and not runs)


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces are made as root")
def test_devices_of_another_namespace_are_seen_as_they_are() -> None:
    """One that runs, one that is up and does not, and one behind the `/sys` of this process."""
    spaces = Namespaces()
    place = f"tcp://{spaces.addresses[1]}:7100"

    def seen(within: Sequence[str]) -> str:
        program = f"from sluice_server.services.transfer.links import left_out; print(left_out({place!r}))"
        done = subprocess.run([*within, sys.executable, "-c", program], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        spaces.make()
        assert seen(spaces.within(1)) == ""
        assert "is not in /sys/class/net" in seen(["nsenter", f"--net=/run/netns/{spaces.names[1]}"])
        for words in (("mode", "dormant"), ("down",), ("up",)):
            ip("-n", spaces.names[1], "link", "set", spaces.links[1], *words)
        assert f"{spaces.links[1]}, the network device of {spaces.addresses[1]}, does not run" in seen(spaces.within(1))
    finally:
        spaces.remove()


@pytest.mark.parametrize(("chosen", "is_asked"), [(False, True), (True, False)])
def test_what_an_operator_has_chosen_is_not_waited_for(
    chosen: bool, is_asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, made = list[str](), list[object]()
    monkeypatch.delenv(by_nixl.CHOSEN, raising=False)
    if chosen:
        monkeypatch.setenv(by_nixl.CHOSEN, "mlx5_0:1")

    class Carrier:
        region = (0, 1)

        def read_directly(self, *given: object) -> None:
            made.append(given)

    agent: Callable[..., object] = lambda *given: type("Agent", (), {"metadata": b""})()  # noqa: E731 # as a class
    monkeypatch.setattr(by_nixl, "wait_for_device", asked.append)
    monkeypatch.setattr(by_nixl, "NixlAgent", agent)
    by_nixl.read_by_nixl(Carrier(), "engine-0", PLACE, 4096)  # type: ignore[arg-type] # all that is used
    assert bool(asked) is is_asked and made
