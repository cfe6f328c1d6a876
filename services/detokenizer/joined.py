"""Builds the text messages of one output from what came for it. Pure."""

from collections.abc import Sequence

from sluice_server.services.detokenizer.output import OutputProgress
from sluice_server.services.messages.details import Timings, TokenRecord
from sluice_server.services.messages.messages import Text, Tokens


def text_of(came: Sequence[Tokens], advance: OutputProgress, records: tuple[TokenRecord, ...], busy_s: float) -> Text:
    """Builds the message of the text of one or more messages of tokens, which follow each other: `admitted` of the
    first, `timings` of the last."""
    first = came[0]
    drafts = [(one.num_drafted, one.num_accepted) for one in came if one.num_drafted]
    return Text(
        envelope=first.envelope,
        first_index=first.first_index,
        tokens=records,
        text=advance.text,
        output_index=first.output_index,
        admitted=first.admitted,
        finish=advance.finish,
        stop_match=advance.stop_match,
        timings=_timings(came[-1].timings, busy_s) if advance.finish is not None else None,
        reasoning=advance.reasoning,
        num_reasoning=advance.num_reasoning,
        tool_calls=advance.tool_calls,
        tool_call_parts=advance.tool_call_parts,
        num_steps=len(came),
        drafts=tuple(drafts),
    )


def joined(texts: Sequence[Text]) -> Text:
    """Joins one or more messages of one attempt of an output, in order: `admitted` of the first, `finish` of the last.

    Sums and concatenates the other fields.
    """
    first, last = texts[0], texts[-1]
    if first is last:
        return first
    return Text(
        envelope=first.envelope,
        first_index=first.first_index,
        tokens=tuple([token for one in texts for token in one.tokens]),
        text="".join([one.text for one in texts]),
        output_index=first.output_index,
        admitted=first.admitted,
        finish=last.finish,
        stop_match=last.stop_match,
        timings=last.timings,
        reasoning="".join([one.reasoning for one in texts]),
        num_reasoning=sum([one.num_reasoning for one in texts]),
        tool_calls=tuple([call for one in texts for call in one.tool_calls]),
        tool_call_parts=tuple([part for one in texts for part in one.tool_call_parts]),
        num_steps=sum([one.num_steps for one in texts]),
        drafts=tuple([draft for one in texts for draft in one.drafts]),
    )


def _timings(timings: Timings | None, busy_s: float) -> Timings:
    """Returns the engine's timings with this stage's own; zeros for the engine's if a stop string ended the output
    here."""
    known = timings or Timings()
    return Timings(known.tokenize_s, known.queue_s, known.prefill_s, known.decode_s, busy_s, known.num_preemptions)
