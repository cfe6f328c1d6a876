"""Tests that our wheels and Hugging Face's `kernels` work in one environment, installed in either order.

`python -m tools.check_beside` needs an index for pip. torch and other dependencies come from the environment it runs
in; the packages under test are installed. Checks: no file belongs to two packages; `kernels` is Hugging Face's; the
newest transformers that accepts it finds it and makes a model; our command streams its demo. `--without-compiler`
builds our wheel without a compiler, `--machine aarch64` as for another machine; the resulting limits are printed.
"""

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORKS = """
import importlib.metadata, pathlib, sys
import kernels, torch, transformers
import sluice_server.kernels.cpu.builds, sluice_server.kernels.ops
from sluice_server.engine.worker.startup.formats import notes_of
from transformers.utils import is_kernels_available

site = pathlib.Path(sys.argv[1])
for module in (kernels, sluice_server):
    assert site in pathlib.Path(module.__file__).parents, module
assert kernels.get_kernel and is_kernels_available()
config = transformers.LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
model = transformers.AutoModelForCausalLM.from_config(config)
packages = ("kernels", "sluice-server", "sluice-client")
files = [{str(one) for one in importlib.metadata.files(name) if one.parts[0] != ".."} for name in packages]
assert sum(map(len, files)) == len(set.union(*files)), "a file belongs to two packages"
print(*(f"{name} {importlib.metadata.version(name)}" for name in ("transformers", *packages)), type(model).__name__)
print("CPU kernels:", sluice_server.kernels.cpu.builds.instruction_set(), *notes_of(torch.float32, ""), sep="; ")
"""
THEIRS = "transformers[kernels]"
MACHINE = "import platform; platform.machine = lambda: {!r}\n"


def main() -> int:
    """Check both orders. Returns 1 if one does not work."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--without-compiler", action="store_true")
    parser.add_argument("--machine", default="", help="the machine that our wheel is built for")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        ours = wheels(Path(scratch), options.machine, options.without_compiler)
        failed = 0
        for order in ([*ours, THEIRS], [THEIRS, *ours]):
            try:
                works(Path(scratch), order)
            except subprocess.CalledProcessError as error:
                print(f"{error.cmd[:3]} exits {error.returncode}", file=sys.stderr)
                failed = 1
    return failed


def wheels(scratch: Path, machine: str, is_without_compiler: bool) -> list[str]:
    """Build our wheels, the server's from its sdist. Returns their paths."""
    environment = dict(os.environ)
    if is_without_compiler:
        environment |= {"CC": "/bin/false", "CXX": "/bin/false"}
    if machine:
        (scratch / "machine").mkdir()
        (scratch / "machine/sitecustomize.py").write_text(MACHINE.format(machine))
        environment["PYTHONPATH"] = str(scratch / "machine")
    made = f"from setuptools import build_meta; build_meta.build_sdist({str(scratch / 'sdist')!r})"
    run([sys.executable, "-c", made], ROOT, environment, subprocess.DEVNULL)
    (sdist,) = (scratch / "sdist").glob("*.tar.gz")
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-cache-dir")
    run([*pip, "-w", str(scratch / "wheels"), str(ROOT / "clients/python"), str(sdist)], scratch, environment)
    return sorted(map(str, (scratch / "wheels").glob("*.whl")))


def works(scratch: Path, order: Sequence[str]) -> None:
    """Install `order` one after another into a new environment, and check it. Raises CalledProcessError."""
    print("installed in this order:", *(Path(one).name for one in order), flush=True)
    with tempfile.TemporaryDirectory(dir=scratch) as name:
        folder = Path(name)
        venv.create(folder / "env", symlinks=True)
        python = str(folder / "env/bin/python")
        site = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "env")}))
        (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")  # .pth files in that folder are not read
        pip = (sys.executable, "-m", "pip", "--python", python, "install", "-q", "--disable-pip-version-check")
        environment = {one: value for one, value in os.environ.items() if one != "PYTHONPATH"}
        for one in order:
            run([*pip, *(["--no-deps", "--force-reinstall"] if one.endswith(".whl") else []), one], folder, environment)
        run([python, "-c", WORKS, str(site)], folder, environment)
        run([str(folder / "env/bin/sluice"), "demo"], folder, environment)


def run(command: Sequence[str], folder: Path, environment: Mapping[str, str], stdout: int | None = None) -> None:
    """Run a command. Raises CalledProcessError."""
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=stdout)


if __name__ == "__main__":
    sys.exit(main())
