"""What is trained and against what: a model on text, or on its target's distribution in the end; a head on its target.

In: inputs and labels of a step. Out: the loss. Knows no optimiser, no schedule and no file but the target's.
"""

from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from sluice_server.demo.head import Head, features_of, initialise_head
from sluice_server.demo.model import Llama
from sluice_server.demo.recipe import TARGET_RECIPE, Recipe

GUESSES = 3  # that a head makes in a row during the decay; until then one


class Pupil(Protocol):
    """What learns."""

    @property
    def model(self) -> nn.Module:
        """What is trained."""

    def loss(self, inputs: Tensor, labels: Tensor, step: int) -> Tensor:
        """Mean cross-entropy in nats; inputs and labels int64 [sequences, length]."""


class HeadPupil:
    """An EAGLE-3 head of a target, which stays as it is."""

    def __init__(self, plan: Recipe, target: Llama, ids: Tensor, device: torch.device) -> None:
        """`ids`: those that the head is to propose, int64, ascending."""
        self._plan = plan
        self._target = target.to(device).eval().requires_grad_(False)
        self.model = Head(plan.shape, self._target, ids.to(device))
        initialise_head(self.model, plan.seed)
        self.model.to(device)

    def loss(self, inputs: Tensor, labels: Tensor, step: int) -> Tensor:
        """See `Pupil`: of guesses in a row, against the target's distribution behind the same tokens."""
        with torch.no_grad():
            features, logits = features_of(self._target, inputs)
            wanted = logits[:, 1:].softmax(dim=2)[..., self.model.get_buffer("t2d")]
        num = GUESSES if step >= self._plan.decay_start else 1
        found = self.model(features[:, :-1], inputs[:, 1:], num)
        each = [
            -(wanted[:, age:] * guess[:, age:].log_softmax(dim=2)).sum(dim=2).mean() for age, guess in enumerate(found)
        ]
        return torch.stack(each).mean()


def exported_target(folder: Path) -> Llama:
    """The target as its users get it, computing in float32."""
    model = Llama(TARGET_RECIPE.shape)
    weights = load_file(folder / TARGET_RECIPE.name / "model.safetensors")
    model.load_state_dict({name: weight.to(torch.float32) for name, weight in weights.items()})
    return model.eval()
