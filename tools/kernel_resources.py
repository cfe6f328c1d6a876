"""Compile the Triton kernels ahead of time and compare their resources with the golden file, or write that file.

`python -m tools.kernel_resources` compares and exits 1 on differences; `--update` accepts them. `--quick` limits it to
the cases of `make test`, `--only TEXT` to names that contain it. Faults with any compiler version (spills, too much
shared memory, no vector loads, no tensor cores, no loads ahead) always fail; the golden figures belong to one version
and to sm_80 and sm_90. `--arch 89,100,120` looks for faults on other architectures.
"""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

# Triton decides at import whether it compiles or interprets kernels.
os.environ["TRITON_INTERPRET"] = "0"
os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # otherwise the size of the machine code depends on file paths

import triton

from sluice_server.kernels.triton.aot import SHARED_BYTES, AotCase, KernelResources, compile_case, faults
from sluice_server.kernels.triton.cases import CASES

GOLDEN_ARCHS = (80, 90)
GOLDEN = Path(__file__).resolve().parent.parent / "tests/kernels/triton/resources.json"


def main() -> int:
    """Run the command line. Returns 1 if there are faults or differences."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--update", action="store_true", help="accept today's figures")
    parser.add_argument("--quick", action="store_true", help="only the cases of make test, each for one architecture")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose name contains it")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile")
    parser.add_argument("--arch", type=_numbers, default=GOLDEN_ARCHS, metavar="80,90", help="compute capabilities")
    arguments = parser.parse_args()
    chosen = [case for case in CASES if arguments.only in case.name and (case.is_quick or not arguments.quick)]
    found, wrong = compile_all(chosen, arguments.jobs, arguments.arch, in_turn=arguments.quick)
    golden: dict[str, Any] = {"triton": "", "cases": {}}
    if GOLDEN.exists():
        golden = json.loads(GOLDEN.read_text())
    if arguments.update:
        write(golden, found, is_whole=len(chosen) == len(CASES) and set(arguments.arch) == set(GOLDEN_ARCHS))
    elif golden["triton"] == triton.__version__:
        wrong += differences(golden["cases"], found)
    else:
        print(f"golden figures are of Triton {golden['triton']}, this is {triton.__version__}: not compared")
    print("\n".join(wrong) or f"{len(found)} compiled kernels are as they should be")
    return bool(wrong)


def compile_all(
    cases: Sequence[AotCase], jobs: int, capabilities: Sequence[int], *, in_turn: bool = False
) -> tuple[dict[str, KernelResources], list[str]]:
    """Compile each case for each architecture, or for one of them `in_turn`. Returns the resources by name and
    architecture, and the faults."""
    asked = []
    for at, case in enumerate(cases):
        fitting = [capability for capability in capabilities if case.since <= capability <= case.until]
        if in_turn and fitting:
            fitting = [fitting[at % len(fitting)]]
        asked += [(CASES.index(case), capability) for capability in fitting]
    if jobs == 1:
        compiled = list(map(_compile, asked))
    else:
        with ProcessPoolExecutor(jobs) as pool:
            compiled = list(pool.map(_compile, asked))
    found, wrong = {}, []
    for (index, capability), (resources, complaints) in zip(asked, compiled, strict=True):
        key = f"{CASES[index].name} sm_{capability}"
        found[key] = resources
        wrong += [f"{key}: {complaint}" for complaint in complaints]
    return found, wrong


def _numbers(text: str) -> tuple[int, ...]:
    numbers = tuple(map(int, text.split(",")))
    if unknown := set(numbers).difference(SHARED_BYTES):
        raise argparse.ArgumentTypeError(f"{unknown}: of {', '.join(map(str, SHARED_BYTES))}")
    return numbers


def _compile(asked: tuple[int, int]) -> tuple[KernelResources, list[str]]:
    index, capability = asked  # a case by its index, as kernels cannot be pickled
    resources = compile_case(CASES[index], capability)
    return resources, faults(CASES[index], capability, resources)


def differences(golden: dict[str, dict[str, int]], found: dict[str, KernelResources]) -> list[str]:
    """Returns a line for each difference from the golden figures.

    A figure that was not taken when a case was accepted is not compared.
    """
    lines = []
    for key, resources in found.items():
        now, before = dataclasses.asdict(resources), golden.get(key, {})
        changed = [
            f"{name} {before.get(name)} → {value}"
            for name, value in now.items()
            if before.get(name, value) != value or not before
        ]
        if changed and key.endswith(tuple(f"sm_{one}" for one in GOLDEN_ARCHS)):
            lines.append(f"{key}: {', '.join(changed)}; accept with python -m tools.kernel_resources --update")
    return lines


def write(golden: dict[str, Any], found: dict[str, KernelResources], is_whole: bool) -> None:
    """Write `found` to the golden file. Other cases in it are kept unless everything was compiled."""
    before = golden["cases"] if golden["triton"] == triton.__version__ and not is_whole else {}
    cases = {**before, **{key: dataclasses.asdict(resources) for key, resources in found.items()}}
    lines = ",\n".join(f"    {json.dumps(key)}: {json.dumps(cases[key])}" for key in sorted(cases))
    GOLDEN.write_text(f'{{\n  "triton": "{triton.__version__}",\n  "cases": {{\n{lines}\n  }}\n}}\n')


if __name__ == "__main__":
    sys.exit(main())
