"""The packaged Python client: its wheel alone, and every example of its page."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.conformance.sdks import CLIENTS, ROOT
from tests.system.service import Service

FOLDER = CLIENTS / "python"
EXAMPLES = re.findall(r"```python\n(.*?)```", (FOLDER / "README.md").read_text(), re.S)


@pytest.mark.long
def test_the_examples_run_against_the_wheel(tmp_path: Path, service: Service) -> None:
    """The dependencies come from the environment, the client from the wheel alone."""
    wheels, place = tmp_path / "wheels", tmp_path / "place"
    copy = tmp_path / "source"
    subprocess.run(["cp", "-r", str(FOLDER), str(copy)], check=True)  # building writes into its folder
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    build = ("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), str(copy))
    subprocess.run([*pip, *build], check=True, stderr=subprocess.DEVNULL)
    (wheel,) = wheels.glob("sluice_client-*.whl")
    with zipfile.ZipFile(wheel) as opened:
        assert {"sluice/py.typed", "sluice/aio/client.py", "sluice/v1/types_pb2.pyi"} <= set(opened.namelist())
        opened.extractall(place)
    assert len(EXAMPLES) >= 4
    for example in EXAMPLES:
        code = f"import sluice; assert sluice.__file__.startswith({str(place)!r})\n" + example
        code = code.replace("127.0.0.1:50051", service.address)
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", code],
            env={"PYTHONPATH": str(place)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0 and not done.stderr, (example, done.stderr)
        assert done.stdout and str(ROOT) not in done.stdout
