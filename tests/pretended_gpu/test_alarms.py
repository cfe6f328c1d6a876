"""The pretended device notices what would go wrong on a real one."""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from sluice_server.kernels.triton.dependent import dependent, wait_for_inputs
from tests.pretended_gpu.cuda import pretend
from tests.pretended_gpu.memory import CUDA, GARBAGE, HostWaits, WrongDevice


@triton.jit  # type: ignore[untyped-decorator]
def add_kernel(x_ptr: torch.Tensor, y_ptr: torch.Tensor, IS_WRONG: tl.constexpr) -> None:
    """Adds neighbouring numbers; wrong if it reads what another program writes."""
    at = tl.program_id(0)
    before = tl.load(y_ptr + at - 1, mask=at > 0, other=0) if IS_WRONG else tl.load(x_ptr + at)
    tl.store(y_ptr + at, tl.load(x_ptr + at) + before)


def test_tensors_say_where_they_are_and_fresh_memory_is_garbage() -> None:
    with pretend():
        made = torch.empty(3, device="cuda")
        assert made.is_cuda and made.device == CUDA and made[1:].view(2, 1).is_cuda
        assert made.isnan().all() and (torch.empty_like(made, dtype=torch.int32) == GARBAGE).all()
        assert not torch.empty(3).is_cuda and not made.cpu().is_cuda
        assert made.new_zeros(2).is_cuda and torch.from_numpy(made.cpu().numpy()).to("cuda").is_cuda


def test_memory_of_both_kinds_is_refused() -> None:
    with pretend():
        x = torch.zeros(3, device="cuda")
        with pytest.raises(WrongDevice):
            x + torch.zeros(3)
        with pytest.raises(WrongDevice):
            add_kernel[(3,)](x, torch.zeros(3), IS_WRONG=False)
        assert (x + torch.tensor(1.0)).is_cuda  # a single number of the host is let pass


@triton.jit  # type: ignore[untyped-decorator]
def early_kernel(y_ptr: torch.Tensor, WAITS: tl.constexpr, IS_DEPENDENT: tl.constexpr) -> None:
    """Writes a number, without waiting for kernels before it if it is wrong."""
    if WAITS:
        wait_for_inputs(IS_DEPENDENT)
    tl.store(y_ptr + tl.program_id(0), 1.0)


def test_a_kernel_that_does_not_wait_for_those_before_is_noticed() -> None:
    with pretend():
        y = torch.zeros(3, device="cuda")
        assert dependent(y) == {"IS_DEPENDENT": True, "launch_pdl": True}
        early_kernel[(3,)](y, WAITS=True, **dependent(y))
        early_kernel[(3,)](y, WAITS=False, IS_DEPENDENT=False)
        with pytest.raises(InterpreterError, match="does not wait"):  # of WroteTooEarly
            early_kernel[(3,)](y, WAITS=False, **dependent(y))


def test_programs_run_in_no_order() -> None:
    x = torch.arange(1, 30)
    with pretend():
        for is_wrong in (True, False):
            y = torch.zeros(29, dtype=torch.int64, device="cuda")
            add_kernel[(29,)](x.to("cuda"), y, IS_WRONG=is_wrong)
            in_order = x.cumsum(0) if is_wrong else 2 * x
            assert torch.equal(y.cpu(), in_order) is not is_wrong


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.tolist(),
        lambda x: bool(x[0] > 0),
        lambda x: x[x > 0],
        lambda x: x.cpu(),
        lambda x: x[[1, 2]],
        lambda x: x.add_(torch.tensor([1.0, 2.0, 3.0], device="cuda")),
        lambda x: torch.cuda.synchronize(),
    ],
)
def test_a_wait_of_the_host_is_refused_in_a_capture_and_counted_elsewhere(wait: object) -> None:
    assert callable(wait)
    with pretend() as gpu:
        x = torch.ones(3, device="cuda")
        wait(x)
        assert gpu.memory.waits
        with pytest.raises(HostWaits), torch.cuda.graph(torch.cuda.CUDAGraph()):
            wait(x)


def test_a_graph_repeats_what_it_recorded_at_the_same_places() -> None:
    """A number of the host stays what it was, and nothing is computed in the capture itself."""
    with pretend() as gpu:
        x, graph, factor = torch.ones(3, device="cuda"), torch.cuda.CUDAGraph(), 2
        with torch.cuda.graph(graph):
            y = x * factor
            add_kernel[(3,)](y, y, IS_WRONG=False)
        assert y.isnan().all() and not gpu.launches
        factor = 3
        for value in (1.0, 5.0):
            x.fill_(value)
            graph.replay()
            assert y.tolist() == [value * 2 * 2] * 3
        assert gpu.replays == 2


def test_a_copy_to_pinned_memory_arrives_with_its_event() -> None:
    with pretend():
        x, pinned, event = torch.ones(3, device="cuda"), torch.empty(3, pin_memory=True), torch.cuda.Event()
        pinned.copy_(x, non_blocking=True)
        event.record()
        x.fill_(2.0)
        assert pinned.isnan().all()
        event.synchronize()
        assert pinned.tolist() == [1.0] * 3
