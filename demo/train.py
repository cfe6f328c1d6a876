"""Train the demo models: `python -m sluice_server.demo.train`.

In: the standard library of the Python that runs it. Out: checkpoints under `.demo-training/`, and the finished models
    under `demo/target`, `demo/draft` and `demo/head`. Ctrl-C stops it after the current step; the next run resumes
    there.
"""

import dataclasses
import signal
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from sluice_server.demo import bpe, checkpoint, corpus, export, recipe
from sluice_server.demo.checkpoint import TOKENIZER_FILE, TRAINING_FOLDER
from sluice_server.demo.head import common_ids
from sluice_server.demo.model import Llama, initialise
from sluice_server.demo.optimiser import Optimiser
from sluice_server.demo.pupils import HeadPupil, Pupil, exported_target

SAVE_EVERY = 100  # steps; about two minutes on a slow CPU
SAY_EVERY = 20  # steps

Teacher = Callable[[Tensor], Tensor]


class Which(StrEnum):
    TARGET = "target"
    DRAFT = "draft"
    HEAD = "head"
    ALL = "all"


def main(
    which: Annotated[Which, typer.Option(help="which model to train")] = Which.ALL,
    tokens: Annotated[int | None, typer.Option(help="tokens to see instead of the recipe's number")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    folder: Annotated[Path, typer.Option(help="where checkpoints go")] = TRAINING_FOLDER,
    out: Annotated[Path, typer.Option(help="where the finished models go")] = export.DEMO_FOLDER,
) -> None:
    """Train the demo models on the standard library's source, resuming what an earlier run left."""
    on = torch.device(device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
    ids = training_stream(folder)
    recipes = [one for one in (recipe.TARGET_RECIPE, recipe.DRAFT_RECIPE) if which in (one.name, Which.ALL)]
    stop = StopSignal()
    for one in recipes:
        train(dataclasses.replace(one, num_tokens=tokens or one.num_tokens), ids, folder, on, stop)
        if stop.is_set:
            return
        export.export(one, folder, out / one.name)
    if which in (Which.HEAD, Which.ALL):
        plan = dataclasses.replace(recipe.HEAD_RECIPE, num_tokens=tokens or recipe.HEAD_RECIPE.num_tokens)
        known = common_ids(ids, plan.shape.vocab_size)
        train(plan, ids, folder, on, stop, HeadPupil(plan, exported_target(out), known, on))
        if not stop.is_set:
            export.export_head(folder, out)


class StopSignal:
    """Notes SIGINT and SIGTERM, which end training between two steps."""

    def __init__(self) -> None:
        self.is_set = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.note)

    def note(self, number: int, frame: object) -> None:
        self.is_set = True


def training_stream(folder: Path) -> Tensor:
    """Returns the training split as one stream of ids (int64). Trains the tokenizer on the first run."""
    documents = corpus.collect(corpus.stdlib_root()).train
    path = folder / TOKENIZER_FILE
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        checkpoint.write_whole(path, bpe.train_tokenizer([document.text for document in documents]).to_str())
    return torch.from_numpy(bpe.stream(bpe.encode_documents(bpe.load_tokenizer(path), documents)))


def train(
    plan: recipe.Recipe,
    ids: Tensor,
    folder: Path,
    device: torch.device,
    stop: StopSignal,
    pupil: Pupil | None = None,
) -> nn.Module:
    """Run `plan` to its end or to `stop`, saving checkpoints. Returns the model."""
    run = TrainingRun(plan, folder, device, pupil)
    with Progress(TextColumn(plan.name), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task(plan.name, total=plan.num_steps, completed=run.progress.step)
        while run.progress.step < plan.num_steps and not stop.is_set:
            loss = run.step(ids)
            bar.update(task, completed=run.progress.step)
            if run.progress.step % SAY_EVERY == 0:
                bar.console.print(
                    f"{plan.name} {run.progress.step}/{plan.num_steps} loss {loss:.4f} {run.progress.seconds:.0f} s"
                )
            if run.progress.step % SAVE_EVERY == 0:
                run.save()
    run.save()
    return run.model


class ModelPupil:
    """A model trained on text; with `learns_from_target`, on the target's distribution during the decay."""

    def __init__(self, plan: recipe.Recipe, folder: Path, device: torch.device) -> None:
        self.model = Llama(plan.shape)
        initialise(self.model, plan.seed)
        self.model.to(device)
        self._plan = plan
        self._folder = folder
        self._device = device
        self._teacher: Teacher | None = None  # loaded when the decay begins

    def loss(self, inputs: Tensor, labels: Tensor, step: int) -> Tensor:
        """Returns the loss; see `Pupil`."""
        if self._plan.learns_from_target and step >= self._plan.decay_start and self._teacher is None:
            self._teacher = load_teacher(self._folder, self._device)
        return loss_of(self.model(inputs), inputs, labels, self._teacher)


class TrainingRun:
    """One model in training: its weights, its optimiser and its progress."""

    def __init__(self, plan: recipe.Recipe, folder: Path, device: torch.device, pupil: Pupil | None = None) -> None:
        """Without a pupil, a `ModelPupil` is trained."""
        self.plan = plan
        self.folder = folder / plan.name
        self.device = device
        self.pupil = pupil or ModelPupil(plan, folder, device)
        self.model = self.pupil.model
        self.optimiser = Optimiser(self.model, plan.matrix_rate, plan.other_rate, plan.weight_decay)
        self.progress = checkpoint.Progress()
        self.resume()

    def resume(self) -> None:
        saved = checkpoint.load(self.folder)
        if saved is None:
            return
        self.progress = saved.progress
        self.model.load_state_dict(saved.weights)
        for name, tensor in saved.optimiser.items():
            self.optimiser.state[name].copy_(tensor)

    def save(self) -> None:
        checkpoint.save(
            self.folder, checkpoint.DemoCheckpoint(self.progress, self.model.state_dict(), self.optimiser.state)
        )

    def step(self, ids: Tensor) -> float:
        """Train on one batch of `ids` (the whole stream). Returns the loss before the update, in nats per token."""
        began = time.monotonic()
        step = self.progress.step
        inputs, labels = batch(self.plan, step, ids, self.device)
        loss = self.pupil.loss(inputs, labels, step)
        loss.backward()
        self.optimiser.step(step, recipe.rate_factor(self.plan, step))
        nats = loss.item()
        self.progress = checkpoint.Progress(
            step + 1, self.progress.num_tokens + inputs.numel(), self.progress.seconds + time.monotonic() - began
        )
        return nats


def batch(plan: recipe.Recipe, step: int, ids: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns inputs and labels of a step, each [sequences, length] (int64)."""
    starts = torch.from_numpy(recipe.sequence_starts(plan, step, ids.shape[0] - 1))
    rows = ids[starts[:, None] + torch.arange(recipe.sequence_length(plan, step) + 1)].to(device)
    return rows[:, :-1], rows[:, 1:]


def loss_of(logits: Tensor, inputs: Tensor, labels: Tensor, teacher: Teacher | None) -> Tensor:
    """Returns the mean cross-entropy in nats, against the text or, with a teacher, against its distribution."""
    if teacher is None:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    with torch.no_grad():
        wanted = teacher(inputs).softmax(dim=2)
    return F.cross_entropy(logits.flatten(0, 1), wanted.flatten(0, 1))


def load_teacher(folder: Path, device: torch.device) -> Teacher:
    saved = checkpoint.load(folder / recipe.TARGET_RECIPE.name)
    if saved is None:
        raise typer.BadParameter(f"the draft learns from the target, and {folder} holds none: train the target first")
    model = Llama(recipe.TARGET_RECIPE.shape)
    model.load_state_dict(saved.weights)
    return model.to(device).eval()


if __name__ == "__main__":
    typer.run(main)
