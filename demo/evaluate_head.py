"""Measure the exported EAGLE-3 head and write its card: `python -m sluice_server.demo.evaluate_head`.

In: `demo/target`, `demo/head`, and the standard library they were trained on. Out: how often its drafts are the
    target's likeliest token, printed, and a README.md beside it.
"""

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from safetensors.torch import load_file

from sluice_server.demo import bpe, checkpoint, corpus, recipe
from sluice_server.demo.checkpoint import TOKENIZER_FILE, TRAINING_FOLDER
from sluice_server.demo.export import DEMO_FOLDER
from sluice_server.demo.head import BEHIND, Head, features_of
from sluice_server.demo.model import Llama
from sluice_server.demo.pupils import GUESSES, exported_target
from sluice_server.demo.score import Ids

LENGTH = 1024  # tokens of each held-out document that are read


@dataclass(frozen=True)
class HeadFigures:
    num_parameters: int
    num_ids: int  # size of the draft vocabulary
    num_tokens: int  # of held-out text
    agreement: tuple[float, ...]  # by position in the draft: share that is the target's likeliest token


def main(
    training: Annotated[Path, typer.Option(help="where checkpoints are")] = TRAINING_FOLDER,
    folder: Annotated[Path, typer.Option(help="where the models are")] = DEMO_FOLDER,
    machine: Annotated[str, typer.Option(help="what it was trained on, for the card")] = platform.machine(),
) -> None:
    """Evaluate the head on the held-out tenth."""
    progress = checkpoint.load_progress(training / recipe.HEAD_RECIPE.name)
    if progress is None:
        raise typer.BadParameter(
            f"{training} holds no head: run `python -m sluice_server.demo.train --which head` first"
        )
    target = exported_target(folder)
    tokenizer = bpe.load_tokenizer(folder / recipe.TARGET_RECIPE.name / TOKENIZER_FILE)
    documents = bpe.encode_documents(tokenizer, corpus.collect(corpus.stdlib_root()).held_out)
    figures = measure(target, load_head(recipe.HEAD_RECIPE, target, folder), documents)
    Console().print(figures)
    page = render(recipe.HEAD_RECIPE, figures, progress, machine)
    checkpoint.write_whole(folder / recipe.HEAD_RECIPE.name / "README.md", page)


def load_head(plan: recipe.Recipe, target: Llama, folder: Path) -> Head:
    """Returns the exported head, computing in float32."""
    weights = load_file(folder / plan.name / "model.safetensors")
    head = Head(plan.shape, target, weights["d2t"] + torch.arange(len(weights["d2t"])))
    head.load_state_dict({name: one.float() if one.is_floating_point() else one for name, one in weights.items()})
    return head.eval()


@torch.inference_mode()
def measure(target: Llama, head: Head, documents: Sequence[Ids]) -> HeadFigures:
    """Draft at the beginnings of documents, each draft as if those before it had been right."""
    ids = torch.nonzero(head.get_buffer("t2d")).flatten()
    right, num_tokens = torch.zeros(GUESSES), 0
    for document in documents:
        tokens = torch.from_numpy(document[None, :LENGTH])
        if tokens.shape[1] <= GUESSES + 1:
            continue
        features, logits = features_of(target, tokens)
        wanted = logits[0, 1 + GUESSES :].argmax(dim=1)
        for age, guess in enumerate(head(features[:, :-1], tokens[:, 1:], GUESSES)):
            right[age] += (ids[guess[0, GUESSES:].argmax(dim=1)] == wanted).sum()
        num_tokens += len(wanted)
    own = sum(weight.numel() for weight in head.parameters()) + head.lm_head.get_buffer("weight").numel()
    return HeadFigures(own, len(ids), num_tokens, tuple((right / num_tokens).tolist()))


def render(plan: recipe.Recipe, figures: HeadFigures, progress: checkpoint.Progress, machine: str) -> str:
    """Returns the card."""
    rows = "\n".join(f"| {num} | {share:.1%} |" for num, share in enumerate(figures.agreement, 1))
    layers = ", ".join(map(str, BEHIND))
    return CARD.format(
        plan=plan,
        shape=plan.shape,
        figures=figures,
        layers=layers,
        rows=rows,
        guesses=GUESSES,
        machine=machine,
        num_tokens=progress.num_tokens,
        minutes=progress.seconds / 60,
    )


CARD = """\
---
license: apache-2.0
language: code
---
# sluice demo, head

The demo model's EAGLE-3 head: it reads what `demo/target` thinks and proposes, `demo/target` decides.

- **Use**: `sluice serve --model demo --speculation eagle --draft-model demo`.
- **Architecture**: EAGLE-3 (arXiv 2503.01840) in the published layout, {figures.num_parameters:,} parameters in bf16:
  `fc` over the target's hidden states behind its layers {layers}; one decoder layer of hidden {shape.hidden_size},
  {shape.num_heads} heads over {shape.num_kv_heads}, SwiGLU {shape.intermediate_size}; an output matrix over the
  {figures.num_ids:,} commonest ids (`d2t`, `t2d`), which is the target's own and was not trained. Embeddings are the
  target's.
- **Data, licence**: those of `demo/target`.

## Measured on held-out text

Share of guesses that are the target's likeliest token, each as if the guesses before it had been right, over
{figures.num_tokens:,} positions:

| guess | agreement |
|---|---|
{rows}

The first guess of `demo/draft` is measured in its own card.

## Training

`python -m sluice_server.demo.train --which head`: {num_tokens:,} tokens in {minutes:.0f} minutes on {machine},
{plan.tokens_per_step:,} a step, Muon and AdamW, against the target's distribution; during the last
{plan.decay_share:.0%} of steps {guesses} guesses in a row, each from the state that the one before left.
`python -m sluice_server.demo.evaluate_head` measures and writes this page.
"""


if __name__ == "__main__":
    typer.run(main)
