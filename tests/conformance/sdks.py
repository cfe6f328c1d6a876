"""The table of SDKs in the suite: how each driver is started, and what it needs."""

import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
CLIENTS = ROOT / "clients"


@dataclasses.dataclass(frozen=True, slots=True)
class Sdk:
    """One SDK.

    Attributes:
        name: in the table of results.
        driver: the command that starts its driver.
        tools: programs that must be there.
        prepare: a script, run in a shell in its folder, that builds the driver; it exits 3 and says why where
            something that it needs is missing.
    """

    name: str
    driver: tuple[str, ...]
    tools: tuple[str, ...] = ()
    prepare: str = ""

    @property
    def missing(self) -> str:
        """The reason why the SDK cannot take part; "" if it can."""
        lacking = [tool for tool in self.tools if shutil.which(tool) is None]
        return f"{', '.join(lacking)} is not installed" if lacking else ""

    def build(self) -> str:
        """Builds the SDK's driver. Returns the reason why it cannot take part, or ""."""
        if self.missing or not self.prepare:
            return self.missing
        folder = CLIENTS / self.name
        done = subprocess.run(["sh", self.prepare], cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode == 3:
            return done.stderr.strip().splitlines()[-1]
        assert done.returncode == 0, f"{folder / self.prepare} failed:\n{done.stdout}\n{done.stderr}"
        return ""


PYTHON_DRIVER = (sys.executable, str(CLIENTS / "python" / "conformance" / "driver.py"))
SDKS = (
    Sdk("python", PYTHON_DRIVER),
    Sdk("python asyncio", (*PYTHON_DRIVER, "--aio")),
    Sdk(
        "typescript",
        ("node", str(CLIENTS / "typescript" / "build" / "driver.js")),
        ("node", "npm"),
        "conformance/prepare.sh",
    ),
    Sdk("go", (str(CLIENTS / "go" / "build" / "driver"),), ("go",), "conformance/prepare.sh"),
    Sdk("cpp", (str(CLIENTS / "cpp" / "build" / "driver"),), ("c++", "cmake", "protoc"), "conformance/prepare.sh"),
    Sdk("java", ("sh", str(CLIENTS / "java" / "build" / "driver.sh")), ("javac", "protoc"), "conformance/prepare.sh"),
)
