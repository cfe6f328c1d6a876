"""Joins the waiting text messages of one output into one message. Pure."""

from collections.abc import Sequence

from sluice_server.services.messages.messages import Text


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
