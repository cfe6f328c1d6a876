"""Which network devices of this host UCX takes, and so NIXL: those that `/sys/class/net` lists and that run.

What it leaves out when it starts it does not use later, and without an error: peers are then given addresses of other
devices, often of the loopback device alone. A device that is up runs once the kernel has seen its carrier, which may
take a second; and a process that was put into a network namespace without a `/sys` of its own reads that of another.
"""

import fcntl
import socket
import struct
import time
from pathlib import Path

DEVICES = Path("/sys/class/net")  # where UCX looks
ADDRESS_OF, FLAGS_OF = 0x8915, 0x8913  # SIOCGIFADDR, SIOCGIFFLAGS: see netdevice(7)
RUNS = 0x40  # IFF_RUNNING
START_S = 5.0  # until a device has to run
LOOK_S = 0.02


def wait_for_device(place: str, patience_s: float = START_S) -> None:
    """Waits until UCX takes the device with a place's address, as in `tcp://192.0.2.1:7100`.

    Raises OSError saying why it does not, and what to do. Places without an IPv4 address of this host are let pass.
    """
    end_s = time.monotonic() + patience_s
    while why := left_out(place):
        if time.monotonic() >= end_s:
            raise OSError(why)
        time.sleep(LOOK_S)


def left_out(place: str) -> str:
    """Returns why UCX leaves out the device with a place's address now; "" if it does not."""
    host = place.rpartition("//")[2].rpartition(":")[0]
    devices = {_address(name): name for _, name in socket.if_nameindex()}
    name = devices.get(host, "")
    if not name:
        return ""
    of = f"{name}, the network device of {host}"
    if not (DEVICES / name).exists():
        text = f"{of}, is not in {DEVICES}, where NIXL's UCX looks: /sys is that of another network namespace"
        return f"{text}; mount one for this process's, as `ip netns exec` does"
    (flags,) = struct.unpack_from("h", _asked(FLAGS_OF, name))
    if not flags & RUNS:
        return f"{of}, does not run, so that NIXL's UCX leaves it out: see `ip link show {name}`"
    return ""


def _address(name: str) -> str:
    """Returns the IPv4 address of a device; "" if it has none."""
    try:
        return socket.inet_ntoa(_asked(ADDRESS_OF, name)[4:8])  # behind family and port
    except OSError:
        return ""


def _asked(what: int, name: str) -> bytes:
    """Returns what the kernel says of a device: of `struct ifreq`, all behind the name."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        return fcntl.ioctl(asking, what, struct.pack("16s24x", name.encode()))[16:]
