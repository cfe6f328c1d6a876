"""The optimiser: Muon for the matrices, AdamW for the embedding and the norms.

In: named parameters with gradients, and a rate factor. Out: updated parameters. All state is named tensors, so that a
    checkpoint is a safetensors file. Independent of schedules and files.
"""

import torch
from torch import Tensor, nn

MOMENTUM = 0.95  # Muon, Nesterov
BETAS = (0.9, 0.95)  # AdamW
EPSILON = 1e-8
# The quintic of Muon's authors: five rounds bring the singular values of a normalised matrix close to one.
QUINTIC = (3.4445, -4.7750, 2.0315)
QUINTIC_ROUNDS = 5


class Optimiser:
    def __init__(self, model: nn.Module, matrix_rate: float, other_rate: float, weight_decay: float) -> None:
        parameters = dict(model.named_parameters())
        self.matrices = {name: weight for name, weight in parameters.items() if is_matrix(name, weight)}
        self.others = {name: weight for name, weight in parameters.items() if not is_matrix(name, weight)}
        self.matrix_rate = matrix_rate
        self.other_rate = other_rate
        self.weight_decay = weight_decay
        self.state = {f"{name}.momentum": torch.zeros_like(weight) for name, weight in parameters.items()}
        self.state |= {f"{name}.square": torch.zeros_like(weight) for name, weight in self.others.items()}

    @torch.no_grad()
    def step(self, step: int, factor: float) -> None:
        """Update every parameter by its gradient, then clear the gradients. `step` counts from 0."""
        for shape in sorted({tuple(weight.shape) for weight in self.matrices.values()}):
            self.move_matrices([name for name, weight in self.matrices.items() if tuple(weight.shape) == shape], factor)
        for name in self.others:
            self.move_other(name, step, factor)
        for weight in (*self.matrices.values(), *self.others.values()):
            weight.grad = None

    def move_matrices(self, names: list[str], factor: float) -> None:
        directions = orthogonal(torch.stack([self.nesterov(name) for name in names]))
        rate = self.matrix_rate * factor
        for name, direction in zip(names, directions, strict=True):
            weight = self.matrices[name]
            weight.mul_(1 - rate * self.weight_decay)
            weight.add_(direction, alpha=-rate * max(1.0, weight.shape[0] / weight.shape[1]) ** 0.5)

    def nesterov(self, name: str) -> Tensor:
        gradient = gradient_of(self.matrices[name])
        momentum = self.state[f"{name}.momentum"].lerp_(gradient, 1 - MOMENTUM)
        ahead: Tensor = gradient.lerp(momentum, MOMENTUM)
        return ahead

    def move_other(self, name: str, step: int, factor: float) -> None:
        weight = self.others[name]
        gradient = gradient_of(weight)
        momentum = self.state[f"{name}.momentum"].lerp_(gradient, 1 - BETAS[0])
        square = self.state[f"{name}.square"].lerp_(gradient.square(), 1 - BETAS[1])
        spread = (square / (1 - BETAS[1] ** (step + 1))).sqrt_().add_(EPSILON)
        rate = self.other_rate * factor
        if weight.ndim == 2:
            weight.mul_(1 - rate * self.weight_decay)
        weight.addcdiv_(momentum / (1 - BETAS[0] ** (step + 1)), spread, value=-rate)


def is_matrix(name: str, weight: Tensor) -> bool:
    return weight.ndim == 2 and "embed" not in name


def gradient_of(weight: Tensor) -> Tensor:
    assert weight.grad is not None
    return weight.grad


def orthogonal(stack: Tensor) -> Tensor:
    """Returns the nearest matrices with singular values close to one; [matrices, rows, columns] (fp32)."""
    a, b, c = QUINTIC
    is_tall = stack.shape[1] > stack.shape[2]
    wide = stack.transpose(1, 2) if is_tall else stack
    wide = wide / (wide.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(QUINTIC_ROUNDS):
        gram = wide @ wide.transpose(1, 2)
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    result: Tensor = wide.transpose(1, 2) if is_tall else wide
    return result
