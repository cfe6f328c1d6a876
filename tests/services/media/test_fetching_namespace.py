"""No connection is made to an address that is not public: a listener at every address of a namespace hears none."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHILD = "tests.services.media.namespace_child"
ADDRESSES = ("169.254.169.254/32", "10.1.2.3/32", "192.168.7.7/32", "100.64.0.1/32", "93.184.215.14/32")
NAMES = {
    "metadata.example": ["169.254.169.254"],
    "inside.example": ["10.1.2.3"],
    "both.example": ["93.184.215.14", "10.1.2.3"],  # one answer is public
    "self.example": ["127.0.0.1", "::1"],
    "mapped.example": ["::ffff:10.1.2.3"],
    "shared.example": ["100.64.0.1"],
}
URLS = (
    *(f"https://{name}/a.png" for name in NAMES),
    "https://127.0.0.1/a.png",
    "https://169.254.169.254/latest/meta-data",
    "https://[::1]/a.png",
    "https://[::ffff:10.1.2.3]/a.png",
    "https://[64:ff9b::a01:203]/a.png",
    "https://2130706433/a.png",
    "https://0x7f.1/a.png",
    "https://inside.example:8443/a.png",
)
OTHERS = ("http://inside.example/a.png", "file:///etc/passwd", "https://a@inside.example/a.png")


def commands(folder: Path) -> str:
    """What makes the namespace's addresses and names, and runs the child."""
    names = "".join(f"{address} {name}\n" for name, own in NAMES.items() for address in own)
    (folder / "hosts").write_text(names)
    (folder / "nsswitch.conf").write_text("hosts: files\n")
    lines = ["set -e", "ip link set lo up", *(f"ip addr add {one} dev lo" for one in ADDRESSES)]
    lines += [
        f"mount --bind {folder}/{name} /etc/{name}"
        for name in ("hosts", "nsswitch.conf")
        if Path(f"/etc/{name}").exists()
    ]
    return "\n".join([*lines, 'exec "$@"'])


def test_no_connection_is_made_to_an_address_that_is_not_public(tmp_path: Path) -> None:
    unshare = ["unshare", "--net", "--mount", "--map-root-user"]
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("needs unshare and ip")
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("may not make namespaces")
    child = [sys.executable, "-m", CHILD, *URLS, *OTHERS]
    run = subprocess.run(
        [*unshare, "bash", "-c", commands(tmp_path), "run", *child],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["came"] == 0, "a connection was made"
    assert "fetched" not in found["said"].values()
    for url in URLS[: len(NAMES)]:
        assert found["said"][url] == "has an address that is not public, which is not dialled", url
    assert found["unchecked"] >= len(NAMES) and found["direct"] == 1, "the listener hears nothing"
