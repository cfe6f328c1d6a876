"""Measure the exported demo models and write their model cards: `python -m sluice_server.demo.evaluate`.

In: `demo/target`, `demo/draft`, and the standard library they were trained on. Out: the figures, printed, and a
README.md beside each model.
"""

import dataclasses
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import torch
import typer
from rich.console import Console
from safetensors.torch import load_file
from tokenizers import Tokenizer

from sluice_server.demo import bpe, card, checkpoint, completion, corpus, recipe, score
from sluice_server.demo.checkpoint import TOKENIZER_FILE, TRAINING_FOLDER
from sluice_server.demo.export import DEMO_FOLDER
from sluice_server.demo.model import Llama, num_parameters


def main(
    training: Annotated[Path, typer.Option(help="where checkpoints are")] = TRAINING_FOLDER,
    folder: Annotated[Path, typer.Option(help="where the two models are")] = DEMO_FOLDER,
    machine: Annotated[str, typer.Option(help="what it was trained on, for the card")] = platform.machine(),
) -> None:
    """Evaluate both models on the held-out tenth."""
    figures = measure(training, folder, machine)
    Console().print(dataclasses.asdict(figures))
    for plan in (recipe.TARGET_RECIPE, recipe.DRAFT_RECIPE):
        checkpoint.write_whole(folder / plan.name / "README.md", card.render(plan, figures))


def measure(training: Path, folder: Path, machine: str) -> card.Figures:
    split = corpus.collect(corpus.stdlib_root())
    num_bytes = corpus.num_bytes(split.held_out)
    tokenizer = bpe.load_tokenizer(folder / recipe.TARGET_RECIPE.name / TOKENIZER_FILE)
    encoded = bpe.encode_documents(tokenizer, split.held_out)
    target, draft = (load_exported(plan, folder) for plan in (recipe.TARGET_RECIPE, recipe.DRAFT_RECIPE))
    scored = score.score(target, draft, encoded)
    train_ids = [ids[1:] for ids in bpe.encode_documents(tokenizer, split.train)]
    held_out_ids = [ids[1:] for ids in encoded]
    return card.Figures(
        machine=machine,
        python=platform.python_version(),
        num_train_files=len(split.train),
        num_train_bytes=corpus.num_bytes(split.train),
        num_train_tokens=sum(ids.shape[0] for ids in train_ids),
        num_held_out_files=len(split.held_out),
        num_held_out_bytes=num_bytes,
        num_held_out_tokens=scored.num_tokens,
        byte_ngram=score.ngram_bits_per_byte(as_bytes(split.train), as_bytes(split.held_out), 256, num_bytes),
        token_ngram=score.ngram_bits_per_byte(train_ids, held_out_ids, bpe.VOCAB_SIZE, num_bytes),
        agreement=scored.num_agreed / scored.num_tokens,
        target=model_figures(target, scored.target_nats, training / recipe.TARGET_RECIPE.name, split, tokenizer),
        draft=model_figures(draft, scored.draft_nats, training / recipe.DRAFT_RECIPE.name, split, tokenizer),
    )


def model_figures(
    model: Llama, nats: float, training: Path, split: corpus.Corpus, tokenizer: Tokenizer
) -> card.ModelFigures:
    progress = checkpoint.load_progress(training)
    if progress is None:
        raise typer.BadParameter(f"{training} holds no checkpoint: run `python -m sluice_server.demo.train` first")
    return card.ModelFigures(
        num_parameters=num_parameters(model),
        bits_per_byte=score.bits_per_byte(nats, corpus.num_bytes(split.held_out)),
        parse_rate=completion.parse_rate(model, tokenizer, split.held_out),
        num_tokens=progress.num_tokens,
        seconds=progress.seconds,
    )


def load_exported(plan: recipe.Recipe, folder: Path) -> Llama:
    """Returns the exported model: weights rounded to bf16, computing in fp32."""
    model = Llama(plan.shape)
    weights = load_file(folder / plan.name / "model.safetensors")
    model.load_state_dict({name: weight.to(torch.float32) for name, weight in weights.items()})
    return model.eval()


def as_bytes(documents: Sequence[corpus.Document]) -> list[npt.NDArray[np.int64]]:
    return [np.frombuffer(document.text.encode(), dtype=np.uint8).astype(np.int64) for document in documents]


if __name__ == "__main__":
    typer.run(main)
