"""Writes docs/reference/sampling-parameters.md from the engine's table: `python -m tools.sampling_parameters`."""

import inspect
from collections.abc import Mapping
from pathlib import Path

import msgspec
import sluice

from sluice_server.engine.parameter_kinds import Biases, Flag, Ids, Number, Parameter
from sluice_server.engine.parameters import FROM_MODEL, PARAMETERS
from sluice_server.engine.request import Limits, SamplingParams
from sluice_server.services.cli.generate import generate
from sluice_server.services.edge.wire import ChatRequest, CompletionRequest
from sluice_server.services.gateway.oip.translate import SamplingOptions

ROOT = Path(__file__).resolve().parent.parent
PAGE = "docs/reference/sampling-parameters.md"
LIMITS = Limits(context_length=1 << 40, vocab_size=1 << 40)  # larger than any model's
WORDS: Mapping[float, str] = {LIMITS.context_length: "the context", 2**31 - 1: "2^31 - 1", 2**64 - 1: "2^64 - 1"}
PLACES: Mapping[str, frozenset[str]] = {
    "chat": frozenset(one.name for one in msgspec.structs.fields(ChatRequest)),
    "completions": frozenset(one.name for one in msgspec.structs.fields(CompletionRequest)),
    "Open Inference": frozenset(SamplingOptions.__struct_fields__) - {"n"},  # `n` can only be 1 there
    "`sluice generate`": frozenset(inspect.signature(generate).parameters),
    "Python SDK": frozenset(sluice.GenerateOptions.__annotations__),
}


HEAD = """<!-- Written by tools/sampling_parameters.py, never by hand. -->
# Sampling parameters

Names are the engine's; the fields are those of `protos/sluice/v1/types.proto`. A dot says that a parameter can be given
there under its own name: in bodies of the HTTP edge's `/v1/chat/completions` and `/v1/completions`, in
`sampling_parameters` of the Open Inference Protocol, as an option of `sluice generate` (`--top-k`), as an option of
the Python SDK. What has none is set on a GenerationSpec. At the edge `logprobs` of a chat is true or false, its number
`top_logprobs`.
"""
TEXTS = f"""
Parameters that are text:
`stop.strings`, at most {LIMITS.max_stop_strings}, each 1 to {LIMITS.max_stop_bytes} bytes, and
`sampling.bad_words`, at most {LIMITS.max_bad_words}, each 1 to {LIMITS.max_bad_word_bytes} bytes.
What changes the logits is asked for by `sampling.logits_processors`, at most {LIMITS.max_logits_processors}, and what
chooses the tokens in place of temperature, top_k, top_p, min_p and typical_p by `sampling.strategy`: see
[Plugins](../plugins.md).
"""
DEFAULTS = f"""
## Defaults of a model

What a checkpoint's generation_config.json says of these holds where a request does not say:
{", ".join(f"`{row.name}`" for row in FROM_MODEL)}.
`do_sample: false` is a temperature of 0, and a `top_k` of -1 is 0. A file with values that no request may have is
refused at start. `GetModel` returns the defaults, and `Accepted` what a request runs with. A beam search takes no
penalties: there `repetition_penalty` is 1 unless the request says otherwise.
"""


def page() -> str:
    """Returns the whole page."""
    columns = ["Parameter", "What it is", "Range", "Where absent", "Field of GenerationSpec", *PLACES]
    rows = [columns, ["---"] * len(columns), *map(_row, PARAMETERS)]
    table = "".join(f"| {' | '.join(cells)} |\n" for cells in rows)
    return f"{HEAD}\n{table}{TEXTS}{DEFAULTS}"


def _row(row: Parameter) -> list[str]:
    marks = ["·" if row.name in names else "" for names in PLACES.values()]
    return [f"`{row.name}`", row.meaning, _range(row), _absent(row), f"`{row.field}`", *marks]


def _range(row: Parameter) -> str:
    match row:
        case Flag():
            return "true or false"
        case Ids():
            return f"at most {row.most(LIMITS):,} ids"
        case Biases():
            most = LIMITS.max_logit_bias
            return f"at most {row.most(LIMITS):,} ids, each {-most:g} to {most:g}"
        case Number():
            low, high = row.bounds(SamplingParams(), LIMITS)
            if row.is_above:
                return f"above {low:g}, at most {_number(high)}"
            return f"{_number(low + 1 if low == row.off else low)} to {_number(high)}"


def _absent(row: Parameter) -> str:
    if not isinstance(row, Number):
        return "false" if isinstance(row, Flag) else "none"
    found = row.absent or _number(row.neutral)
    return f"the model's, else {found}" if row.from_model else found


def _number(value: float) -> str:
    return WORDS.get(value) or f"{value:,.15g}"


def main() -> None:
    """Write the page."""
    path = ROOT / PAGE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page())


if __name__ == "__main__":
    main()
