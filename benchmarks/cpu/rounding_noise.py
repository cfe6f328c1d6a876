"""How far two right implementations of 8-bit activations are from each other: what a comparison with a peer can show.

    python -m benchmarks.cpu.rounding_noise [--windows 2] [--size 128]

transformers computes a published model in float32, with the inputs of every linear layer rounded to 8 bits in groups of
32, as here and in llama.cpp. The same is computed again with noise in front of the rounding, as small as what another
order of additions causes.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks import real_model
from benchmarks.cpu.divergence import Array, compare, log_softmax
from benchmarks.machine import write

GROUP = 32
LEVELS = 127
NOISES = (1e-7, 1e-6, 1e-5)
SMALLEST = 1e-30  # scale of a group of zeros


def rounded(x: Tensor) -> Tensor:
    """The values of x after rounding to 8 bits in groups of 32, each with its own scale."""
    groups = x.reshape(-1, GROUP)
    scale = (groups.abs().amax(-1, keepdim=True) / LEVELS).clamp_min(SMALLEST)
    return (torch.round(groups / scale) * scale).reshape(x.shape)


def noisy(x: Tensor, noise: float) -> Tensor:
    """The values of x with relative noise."""
    return x * (1 + noise * torch.randn_like(x))


def rounded_noisy(x: Tensor, noise: float) -> Tensor:
    """The values of x with relative noise, after rounding."""
    return rounded(noisy(x, noise))


def logits(model: torch.nn.Module, windows: Sequence[Sequence[int]], change: Callable[[Tensor], Tensor]) -> list[Array]:
    """float32 [T, V] of each window, with the inputs of all linear layers changed."""
    linears = [one for one in model.modules() if isinstance(one, torch.nn.Linear)]
    hooks = [one.register_forward_pre_hook(lambda _, inputs: (change(inputs[0]),)) for one in linears]
    try:
        with torch.inference_mode():
            return [model(torch.tensor([ids])).logits[0].numpy() for ids in windows]
    finally:
        for hook in hooks:
            hook.remove()


def measure(num: int, size: int) -> dict[str, float]:
    """Mean divergences (KL, nats) of the second from the first that each line names."""
    windows = real_model.windows(num, size)
    folder = real_model.checkpoint("permuted")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    torch.manual_seed(0)
    exact = [log_softmax(one) for one in logits(model, windows, lambda x: x)]
    found = {}

    def tell(name: str, change: Callable[[Tensor], Tensor], reference: list[Array]) -> None:
        found[name] = round(compare(windows, logits(model, windows, change), reference).divergence, 9)

    tell("exact; with noise of 1e-06", partial(noisy, noise=1e-6), exact)
    tell("exact; rounded", rounded, exact)
    reference = [log_softmax(one) for one in logits(model, windows, rounded)]
    for noise in NOISES:
        tell(f"rounded; rounded behind noise of {noise:.0e}", partial(rounded_noisy, noise=noise), reference)
    return found


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--size", type=int, default=128, help="tokens of a window")
    options = parser.parse_args()
    command = f"python -m benchmarks.cpu.rounding_noise --windows {options.windows} --size {options.size}"
    write("cpu_rounding_noise", command, {"divergence": measure(options.windows, options.size)})


if __name__ == "__main__":
    main()
