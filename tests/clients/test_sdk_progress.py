"""The client's record of what it has received, and its request for the rest."""

from sluice.progress import Event, Progress
from sluice.received import BATCH
from sluice.v1 import inference_pb2, types_pb2

EFFECTIVE = types_pb2.EffectiveParams(
    sampling=types_pb2.SamplingParams(seed=7, max_tokens=9, temperature=0.5),
    stop=types_pb2.StopConditions(ignore_eos=True),
)


def told(progress: Progress, *events: Event) -> list[types_pb2.Delta]:
    found = [progress.take(event) for event in events]
    return [delta for delta in found if delta is not None]


def accepted(generation_id: str = "g.0") -> inference_pb2.StreamGenerateResponse:
    named = types_pb2.Accepted(generation_id=generation_id, model="m", revision="r", params=EFFECTIVE)
    return inference_pb2.StreamGenerateResponse(accepted=named)


def delta(seq: int, *ids: int, index: int = 0, held: int = 0) -> inference_pb2.StreamGenerateResponse:
    made = types_pb2.Delta(seq=seq, output_index=index, text=f"<{seq}>", consumed=len(ids) + held)
    made.tokens.extend(types_pb2.Token(id=one) for one in ids)
    return inference_pb2.StreamGenerateResponse(delta=made)


def test_a_delta_that_was_seen_is_not_told_again() -> None:
    progress = Progress(types_pb2.GenerationSpec(text="a"))
    assert [one.seq for one in told(progress, accepted(), delta(1, 5), delta(2, 6), delta(2, 6), delta(3, 7))] == [
        1,
        2,
        3,
    ]
    assert (progress.last_seq, progress.num_tokens) == (3, 3)


def test_the_rest_is_the_effective_spec_and_the_ids() -> None:
    spec = types_pb2.GenerationSpec(text="a", idempotency_key="k", credit_window=4)
    spec.sampling.temperature = 0.1
    progress = Progress(spec)
    told(progress, accepted(), delta(1, 5, 6), delta(2, 8, index=1))
    rest = progress.rest()
    assert (rest.text, rest.model, rest.revision, rest.sampling.seed, rest.sampling.temperature) == (
        "a",
        "m",
        "r",
        7,
        0.5,
    )
    assert not rest.HasField("credit_window") and rest.stop.ignore_eos
    assert (rest.resume.generation_id, rest.resume.after_seq) == ("g.0", 2)
    assert [(one.output_index, list(one.token_ids)) for one in rest.resume.outputs] == [(0, [5, 6]), (1, [8])]
    assert spec.credit_window == 4


def test_no_id_is_lost_between_batches() -> None:
    progress = Progress(types_pb2.GenerationSpec(text="a"))
    for seq in range(1, 2 * BATCH + 3):
        told(progress, delta(seq, 10 * seq))
        if seq in (1, BATCH, BATCH + 1):
            assert progress.num_tokens == seq and progress.can_go_on
    told(progress, accepted(), inference_pb2.ConverseResponse())
    (output,) = progress.rest().resume.outputs
    assert list(output.token_ids) == [10 * seq for seq in range(1, 2 * BATCH + 3)]


def test_without_all_ids_the_rest_has_no_prompt_to_begin_again_with() -> None:
    progress = Progress(types_pb2.GenerationSpec(text="a"))
    told(progress, accepted(), delta(1, 5), delta(2, held=1))
    assert progress.rest().WhichOneof("prompt") is None and not progress.can_go_on


def test_what_has_told_nothing_is_asked_for_again_unless_its_server_keeps_it() -> None:
    progress = Progress(types_pb2.GenerationSpec(text="a"))
    told(progress, accepted())
    assert progress.can_go_on and not progress.has_begun
    progress.spec.scheduling.on_disconnect = types_pb2.DISCONNECT_ACTION_DETACH
    assert progress.has_begun


def test_ends_are_kept_once_and_a_later_name_is_the_one_to_resume() -> None:
    progress = Progress(types_pb2.GenerationSpec(text="a"))
    end = types_pb2.OutputFinished(completion_tokens=1)
    again = types_pb2.OutputFinished(completion_tokens=9)
    told(
        progress,
        accepted(),
        delta(1, 5),
        inference_pb2.StreamGenerateResponse(output_finished=end),
        accepted("g.1"),
        inference_pb2.StreamGenerateResponse(output_finished=again),
    )
    assert progress.ends[0].completion_tokens == 1 and progress.rest().resume.generation_id == "g.1"


def test_a_change_on_the_way_holds_for_a_resumption() -> None:
    progress = Progress(types_pb2.GenerationSpec(text="a"))
    told(progress, accepted(), delta(1, 5))
    progress.update(inference_pb2.Update(max_tokens=99, priority=3))
    assert (progress.rest().sampling.max_tokens, progress.rest().scheduling.priority) == (99, 3)


def test_it_knows_what_it_waits_for() -> None:
    progress = Progress(types_pb2.GenerationSpec(text="a"))
    waits = inference_pb2.Throttled(reason=inference_pb2.THROTTLE_REASON_CREDIT)
    told(progress, inference_pb2.ConverseResponse(throttled=waits))
    assert progress.throttled == waits
    told(progress, delta(1, 5))
    assert progress.throttled is None


def test_a_bound_that_accepted_left_open_is_the_one_that_was_asked() -> None:
    """Converse accepts before the engine has settled max_tokens."""
    spec = types_pb2.GenerationSpec(text="a", sampling=types_pb2.SamplingParams(max_tokens=20))
    progress = Progress(spec)
    early = accepted()
    early.accepted.params.sampling.ClearField("max_tokens")
    told(progress, early, delta(1, 5))
    assert progress.rest().sampling.max_tokens == 20
