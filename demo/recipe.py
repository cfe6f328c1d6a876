"""The training recipe of each demo model: tokens, batches, learning rates. Pure arithmetic on the step number.

In: a step. Out: its rate, its sequence length, and the positions in the stream where its sequences begin. All follow
    from the step alone, so that a stopped run resumes exactly.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sluice_server.demo.model import DRAFT, HEAD, TARGET, ModelShape

# Positions advance by the golden ratio, modulo the stream: at any time every part was read about equally often.
GOLDEN = 0.6180339887498949


@dataclass(frozen=True)
class Recipe:
    name: str  # the model's folder
    shape: ModelShape
    num_tokens: int  # in total, over several passes of the corpus
    learns_from_target: bool  # during the decay it learns the target's distribution instead of the text
    tokens_per_step: int = 4096
    length: int = 512  # tokens of a sequence, until the decay
    decay_length: int = 2048  # during the decay: uses every position of the model
    warmup_steps: int = 100
    decay_share: float = 0.25  # of all steps, at the end; the rate falls to zero linearly
    matrix_rate: float = 0.02  # Muon: every matrix between the embedding and the logits
    other_rate: float = 0.003  # AdamW: the embedding and the norms
    weight_decay: float = 0.05
    seed: int = 0

    @property
    def num_steps(self) -> int:
        return self.num_tokens // self.tokens_per_step

    @property
    def decay_start(self) -> int:
        return self.num_steps - int(self.num_steps * self.decay_share)


TARGET_RECIPE = Recipe("target", TARGET, num_tokens=7_600_000, learns_from_target=False)
DRAFT_RECIPE = Recipe("draft", DRAFT, num_tokens=3_000_000, learns_from_target=True)
HEAD_RECIPE = Recipe(
    "head",
    HEAD,
    num_tokens=640_000,
    learns_from_target=True,
    tokens_per_step=1024,
    length=256,
    decay_length=1024,
    warmup_steps=20,
    decay_share=0.35,
)


def rate_factor(recipe: Recipe, step: int) -> float:
    """Returns the factor of the learning rates: linear warm-up, constant, linear decay to zero."""
    up = (step + 1) / recipe.warmup_steps
    down = (recipe.num_steps - step) / max(recipe.num_steps - recipe.decay_start, 1)
    return max(min(up, 1.0, down), 0.0)


def sequence_length(recipe: Recipe, step: int) -> int:
    return recipe.length if step < recipe.decay_start else recipe.decay_length


def sequence_starts(recipe: Recipe, step: int, stream_length: int) -> npt.NDArray[np.int64]:
    """Returns where this step's sequences begin in a stream of `stream_length` tokens; int64 [sequences]."""
    length = sequence_length(recipe, step)
    num_sequences = recipe.tokens_per_step // length
    turns = (np.arange(num_sequences) + step * num_sequences + 1) * GOLDEN % 1.0
    return (turns * (stream_length - length)).astype(np.int64)
