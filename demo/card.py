"""Renders the model card of a demo model. In: its recipe and figures. Out: Markdown with the hub's front matter.

Pure: measures nothing and writes no files.
"""

from dataclasses import dataclass

from sluice_server.demo.recipe import Recipe


@dataclass(frozen=True)
class ModelFigures:
    num_parameters: int
    bits_per_byte: float  # on the held-out tenth
    parse_rate: float  # of 100 completions
    num_tokens: int  # seen in training
    seconds: float  # wall-clock time of training


@dataclass(frozen=True)
class Figures:
    machine: str
    python: str  # version of the standard library
    num_train_files: int
    num_train_bytes: int
    num_train_tokens: int
    num_held_out_files: int
    num_held_out_bytes: int
    num_held_out_tokens: int
    byte_ngram: float  # bits per byte on the held-out tenth; so is the next field
    token_ngram: float
    agreement: float  # share of held-out tokens where both models have the same likeliest token
    target: ModelFigures
    draft: ModelFigures


def render(plan: Recipe, figures: Figures) -> str:
    own = figures.draft if plan.learns_from_target else figures.target
    return CARD.format(
        plan=plan,
        shape=plan.shape,
        figures=figures,
        own=own,
        minutes=own.seconds / 60,
        passes=own.num_tokens / figures.num_train_tokens,
        imitating=IMITATING if plan.learns_from_target else "",
        role=ROLES[plan.name],
        over_byte=own.bits_per_byte / figures.byte_ngram - 1,
        over_token=own.bits_per_byte / figures.token_ngram - 1,
    )


IMITATING = ", with the target's distribution in the place of the text"
ROLES = {
    "target": "The demo model: small enough to live in a repository, good enough to write plausible Python.",
    "draft": "The demo model's draft: it proposes, `demo/target` decides. Its training ended in imitating it.",
}

CARD = """\
---
license: apache-2.0
language: code
library_name: transformers
pipeline_tag: text-generation
---
# sluice demo, {plan.name}

{role}

- **Use**: trying out and testing a server without a download. It knows Python's standard library by style, not by
  fact. Do not use what it writes.
- **Architecture**: Llama, {own.num_parameters:,} parameters in bf16: {shape.num_layers} layers, hidden
  {shape.hidden_size}, {shape.num_heads} heads over {shape.num_kv_heads} of keys and values, {shape.head_dim} each,
  SwiGLU {shape.intermediate_size}, tied embeddings, {shape.max_positions:,} positions. Byte-level BPE of
  {shape.vocab_size:,} pieces, the same for target and draft; `<|endoftext|>` opens and ends a document.
- **Chat**: it never read a dialogue. Its template turns what the user says into a comment, for code to answer.
- **Data**: the source of the standard library of Python {figures.python} without its tests and generated tables (PSF
  License 2.0): {figures.num_train_files} files, {figures.num_train_bytes:,} bytes, {figures.num_train_tokens:,} tokens.
  Held out: {figures.num_held_out_files} files, chosen by a hash of their path, {figures.num_held_out_bytes:,} bytes,
  {figures.num_held_out_tokens:,} tokens.
- **Licence**: weights Apache-2.0.

## Measured on the held-out files

| | bits per byte |
|---|---|
| byte 5-gram, interpolated Kneser-Ney | {figures.byte_ngram:.3f} |
| 5-gram over the same BPE tokens, interpolated Kneser-Ney | {figures.token_ngram:.3f} |
| draft | {figures.draft.bits_per_byte:.3f} |
| target | {figures.target.bits_per_byte:.3f} |

This model against the byte 5-gram: {over_byte:+.1%}; against the token 5-gram: {over_token:+.1%}. Both were counted
on the same training files. The models read windows of {shape.max_positions:,} tokens that overlap by 512; the end of a
document is not counted. Files were held out by path, not by content: some share an author or habits with others, and
`_pydecimal.py` alone is a quarter of the bytes.

- **`ast.parse`** accepts {own.parse_rate:.0%} of 100 completions. Prompts are the lines of held-out module-level
  functions up to their first statement (docstring included, at most 128 tokens), evenly spread over all of them; a
  completion is 96 tokens at temperature 0.7, cut where the function ends or else at the last complete line, and parsed
  with its prompt. One that adds no statement counts as a failure.
- **Agreement**: after the same held-out text, draft and target have the same likeliest token at
  {figures.agreement:.1%} of positions.

## Training

`python -m sluice_server.demo.train --which {plan.name}`: {own.num_tokens:,} tokens ({passes:.1f} passes)
in {minutes:.0f} minutes on
{figures.machine}. Muon and AdamW, {plan.tokens_per_step:,} tokens a step; the rate falls to zero over the last
{plan.decay_share:.0%} of steps, in sequences of {plan.decay_length:,} tokens instead of {plan.length:,}{imitating}.
`python -m sluice_server.demo.evaluate` measures and writes this page.
"""
