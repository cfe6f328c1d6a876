"""The models in training and their losses: an EAGLE-3 head, trained on its target's distribution.

In: inputs and labels of a step. Out: the loss. Independent of optimiser and schedule; reads no file but the target's.
"""

from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from sluice_server.demo.head import Head, features_of, initialise_head
from sluice_server.demo.model import Llama
from sluice_server.demo.recipe import TARGET_RECIPE, Recipe

GUESSES = 3  # drafts in a row during the decay; one before it


class Pupil(Protocol):
    """A model in training, with its loss."""

    @property
    def model(self) -> nn.Module:
        """The trained module."""

    def loss(self, inputs: Tensor, labels: Tensor, step: int) -> Tensor:
        """Returns the mean cross-entropy in nats; inputs and labels are int64 [sequences, length]."""


class HeadPupil:
    """An EAGLE-3 head in training. Its target is not changed."""

    def __init__(self, plan: Recipe, target: Llama, ids: Tensor, device: torch.device) -> None:
        """`ids`: the draft vocabulary, int64, ascending."""
        self._plan = plan
        self._target = target.to(device).eval().requires_grad_(False)
        self.model = Head(plan.shape, self._target, ids.to(device))
        initialise_head(self.model, plan.seed)
        self.model.to(device)

    def loss(self, inputs: Tensor, labels: Tensor, step: int) -> Tensor:
        """Returns the mean loss of the drafts in a row, against the target's distribution after the same tokens. See
        `Pupil`."""
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
    """Returns the exported target, computing in float32."""
    model = Llama(TARGET_RECIPE.shape)
    weights = load_file(folder / TARGET_RECIPE.name / "model.safetensors")
    model.load_state_dict({name: weight.to(torch.float32) for name, weight in weights.items()})
    return model.eval()
