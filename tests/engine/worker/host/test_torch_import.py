"""Importing torch without what engines do not use: it is smaller, and everything is there for who asks for it."""

import subprocess
import sys

import pytest

BEGIN = """
import importlib, sys
from sluice_server.engine.worker.host.torch_import import DEFERRED, import_torch
import_torch()
import torch
"""


def run(program: str, begin: str = BEGIN) -> str:
    """Returns what a new process prints, which imports torch so."""
    command = [sys.executable, "-W", "error", "-c", begin + program]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_an_engine_computes_without_them() -> None:
    said = run(
        "import sluice_server.services.engine.process\n"
        "x = torch.ones(2, 3)\n"
        "assert torch.nn.functional.softmax(x @ x.T, -1).sum().item() == 2.0\n"
        "assert torch.empty(2, 3, device='meta').t().shape == (3, 2)\n"
        "import linecache\n"
        "print(*(set(DEFERRED) & set(sys.modules)), *linecache.cache)"
    )
    assert said == "\n"


def test_random_numbers_need_none_of_them() -> None:
    said = run(
        "numbers = [torch.rand(1, generator=torch.Generator().manual_seed(1)) for _ in range(2)]\n"
        "print(numbers[0] == numbers[1], *(set(DEFERRED) & set(sys.modules)))\n"
        "importlib.import_module('torch._dynamo')\n"
        "print(torch.rand(1, generator=torch.Generator().manual_seed(1)) == numbers[0])"
    )
    assert said == "tensor([True])\ntensor([True])\n"


@pytest.mark.parametrize(
    "asks",
    [
        "torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)",
        pytest.param("importlib.import_module('torch.nn.quantized').Linear", marks=pytest.mark.long),
        pytest.param("importlib.import_module('torch._prims').add", marks=pytest.mark.long),
        pytest.param("assert importlib.import_module('torch._dynamo').is_compiling() is False", marks=pytest.mark.long),
    ],
)
def test_whatever_is_asked_for_is_there(asks: str) -> None:
    said = run(f"{asks}\nfrom torch import _meta_registrations as found\nprint(callable(vars(found)['activate_meta']))")
    assert said == "True\n"


def test_what_torch_takes_of_them_calls_the_real_one_and_gives_way_to_it() -> None:
    said = run(
        "taken = torch.vmap\n"
        "assert set(DEFERRED).isdisjoint(sys.modules)\n"
        "print(taken(lambda x: x * 2)(torch.ones(2)))\n"
        "print(torch.vmap is importlib.import_module('torch.func').vmap, torch.vmap is taken)\n"
        "higher = importlib.import_module('torch._higher_order_ops')\n"
        "print(torch.cond is higher.cond, torch.while_loop is higher.while_loop, torch.hub.tqdm.__module__)\n"
    )
    assert said == "tensor([2., 2.])\nTrue False\nTrue True tqdm.std\n"


def test_no_stand_in_is_left_once_all_of_torch_is_imported() -> None:
    said = run(
        "from sluice_server.engine.worker.host.torch_import import STANDS_IN\n"
        "def stand_ins():\n"
        "    held = [m for name, m in list(sys.modules.items()) if name.split('.')[0] == 'torch']\n"
        "    return sum(type(value) is type and STANDS_IN in vars(value) for m in held for value in vars(m).values())\n"
        "before = stand_ins()\n"
        "importlib.import_module('torch.utils.flop_counter')\n"
        "print(before > 0, stand_ins())\n"
    )
    assert said == "True 0\n"


def test_what_is_not_there_is_told_as_ever() -> None:
    said = run(
        "print(hasattr(torch.optim, '__wrapped__'), hasattr(torch.optim, 'nothing'))\n"
        "try:\n    importlib.import_module('torch.nothing')\nexcept ModuleNotFoundError as error:\n    print(error)"
    )
    assert said == "False False\nNo module named 'torch.nothing'\n"


def test_a_part_that_this_version_of_torch_lacks_is_left_out() -> None:
    """Other versions have other parts: torch 2.11 has no `torch._native`, and its profiler imports more of torch."""
    program = (
        "import importlib, sys\n"
        "from sluice_server.engine.worker.host import torch_import\n"
        "torch_import.DEFERRED += ('torch._of_another_version',)\n"
        "torch_import.import_torch()\n"
        "import torch\n"
        "importlib.import_module('torch.utils.flop_counter')\n"
        "print(*(name for name in torch_import.DEFERRED if name not in sys.modules))\n"
    )
    assert run(program, begin="") == "torch._of_another_version\n"
