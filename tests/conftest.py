"""Settings of every test process, and how tests are shared among several of them.

Triton kernels are interpreted, unless `make test-gpu` says that a GPU runs them: this is set before Triton is imported,
and transformers imports it. SIGINT gets Python's handler back: a shell ignores it in what it starts in the background,
and the children of a test would inherit that.
"""

import gc
import os
import signal
import sys
from typing import Any

import pytest

os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

os.environ.pop("XDG_RUNTIME_DIR", None)  # what services keep in a test's TMPDIR is looked for there

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests that start whole services and kill processes. They run in one worker, one after the other: their time limits
# are those of a machine with one service, and they wait as much as they compute, beside the worker that computes.
SERVICES = (
    "tests/benchmarks/test_lane_engines.py",
    "tests/conformance/",
    "tests/deploy/test_prometheus.py",
    "tests/ecosystem/",
    "tests/faults/",
    "tests/gpu/test_gpu_models.py",
    "tests/pretended_gpu/test_pretended_services.py",
    "tests/ray/",
    "tests/services/offline/test_offline_equality.py",
    "tests/services/ranks/test_network.py",
    "tests/services/transfer/test_network_carrier.py",
    "tests/system/",
    "tests/tools/test_generations.py",
)


def unit_of(nodeid: str) -> str:
    """The unit of work that a test belongs to: all services are one, every other file is one."""
    return "services" if nodeid.startswith(SERVICES) else nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:  # noqa: ANN401 # a type of xdist
    """Gives each worker whole units, in the order of collection."""
    from xdist.scheduler import LoadScopeScheduling  # not on a machine that runs tests/gpu only

    class Units(LoadScopeScheduling):  # type: ignore[misc] # without types
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

    config.option.loadscopereorder = False
    return Units(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the longest unit first where several workers share the tests."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: not item.nodeid.startswith(SERVICES))


def pytest_collection_finish() -> None:
    """Takes what was imported and collected out of the garbage collector's sight, which would walk all of it again and
    again: half a second each time. Gives each of several workers its share of the cores: a test that is about threads
    sets their number itself."""
    gc.collect()
    gc.freeze()
    torch = sys.modules.get("torch")
    if torch is not None and "PYTEST_XDIST_WORKER_COUNT" in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])))
