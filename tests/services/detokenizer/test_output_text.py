"""Text of unusual ids: ids without a token, runs of byte tokens, stops found at once, ends."""

import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from sluice_server.services.detokenizer.stream import OutputText
from sluice_server.services.tokenizer.chat import ChatTemplate, TemplateSource
from sluice_server.services.tokenizer.encoding import TextEncoder
from tests.oracle.tokenizers import FAMILIES

BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}
WORDS = {"▁": 256, "▁a": 257, "b": 258, "▁▁": 259, "x": 260}


@pytest.fixture(scope="module", params=list(FAMILIES))
def encoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TextEncoder:
    directory = tmp_path_factory.mktemp(request.param)
    FAMILIES[request.param](directory)
    return TextEncoder.load(directory)


def fallback(lead: int = 1, decoder: decoders.Decoder | None = None) -> TextEncoder:
    """256 byte tokens and five words; id 261 is special."""
    tokenizer = Tokenizer(models.BPE(vocab=BYTES | WORDS, merges=[]))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", lead, 0)]
    tokenizer.decoder = decoder or decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return TextEncoder(tokenizer, ChatTemplate(TemplateSource()))


def streamed(output: OutputText, ids: list[int]) -> str:
    return "".join(output.push([token]).text for token in ids) + output.finish()


def test_ids_without_a_token_are_passed_over(encoder: TextEncoder) -> None:
    rng, size = random.Random(11), encoder.tokenizer.get_vocab_size()
    for number in range(2000):
        ids = [rng.randrange(size + size // 3) for _ in range(rng.randrange(1, 12))]
        skip = number % 2 == 0
        output = OutputText(encoder, skip_special_tokens=skip)
        assert streamed(output, ids) == encoder.tokenizer.decode(ids, skip_special_tokens=skip), ids


@pytest.mark.parametrize("lead", [0, 1, 3])
def test_runs_of_byte_tokens_equal_whole_decoding(lead: int) -> None:
    encoder, rng = fallback(lead), random.Random(lead)
    choices = [*"😀é\n ".encode(), 0x20, 0x20, 0xFF, 256, 257, 258, 259, 261, 300]
    for _ in range(2000):
        ids = [rng.choice(choices) for _ in range(rng.randrange(1, 10))]
        ids[rng.randrange(len(ids)) :] = list("é😀 ".encode()) if rng.random() < 0.5 else [256]
        assert streamed(OutputText(encoder), ids) == encoder.tokenizer.decode(ids), ids


@pytest.mark.parametrize("decoder", [decoders.Metaspace(), decoders.Metaspace(prepend_scheme="never"), decoders.Fuse()])
def test_other_decoders_equal_whole_decoding(decoder: decoders.Decoder) -> None:
    encoder, rng = fallback(decoder=decoder), random.Random(2)
    for _ in range(500):
        ids = [rng.randrange(250, 263) for _ in range(rng.randrange(1, 8))]
        assert streamed(OutputText(encoder), ids) == encoder.tokenizer.decode(ids), ids


def test_without_a_decoder_tokens_are_words() -> None:
    encoder = TextEncoder(Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")), ChatTemplate(TemplateSource()))
    assert streamed(OutputText(encoder), [0, 5, 1, 1]) == encoder.tokenizer.decode([0, 5, 1, 1]) == "a b b"


def test_a_stop_string_of_byte_tokens_ends_the_output_at_its_own_token() -> None:
    output = OutputText(fallback(), ["\n"])
    delta = output.push([258, 0x0A, 260, 260])
    assert (delta.text, delta.num_consumed, output.stopped) == ("b", 2, "\n")


def test_a_stop_string_in_a_run_counts_only_while_the_run_is_text() -> None:
    output = OutputText(fallback(), ["\n"])
    assert output.push([0xFF, 0x0A, 260]).text == "\ufffd\ufffdx"
    assert output.stopped is None


def test_a_stop_string_ends_at_the_first_token_whose_text_has_it() -> None:
    encoder, rng, num_stopped = fallback(), random.Random(4), 0
    choices = ["é", "😀", "\n", "a", "b", " a", "▁"]
    for _ in range(1000):
        ids = [token for _ in range(8) for token in rng.choice([list(rng.choice(choices).encode()), [257], [258]])]
        stops = ["".join(rng.choices("é😀\nab ", k=rng.randrange(1, 4))) for _ in range(2)]
        need = next((n for n in range(len(ids) + 1) if any(s in encoder.tokenizer.decode(ids[:n]) for s in stops)), 0)
        output = OutputText(encoder, stops)
        delta = output.push(ids)
        if output.stopped is None:
            delta = delta._replace(text=delta.text + output.finish())
        num_stopped += need > 0
        assert (output.stopped is not None) == (need > 0)
        assert delta.num_consumed == (need or len(ids))
        assert encoder.tokenizer.decode(ids[:need]).startswith(delta.text + (output.stopped or "")) or not need
        assert need or delta.text == encoder.tokenizer.decode(ids)
    assert num_stopped > 100


def test_nothing_follows_a_stop_string_or_the_end(encoder: TextEncoder) -> None:
    ids = encoder.tokenizer.encode("hello world", add_special_tokens=False).ids
    stopped, finished = OutputText(encoder, ["o"]), OutputText(encoder)
    stopped.push(ids)
    assert (stopped.push(ids), stopped.finish(), stopped.stopped) == (("", 0), "", "o")
    finished.push(ids)
    finished.finish()
    assert (finished.push(ids), finished.finish()) == (("", 0), "")


def test_a_stop_string_held_until_the_end_is_found_there() -> None:
    output = OutputText(fallback(), ["\ufffd"])
    assert (output.push([258, 0xE2]).text, output.stopped) == ("b", None)
    assert (output.finish(), output.stopped) == ("", "\ufffd")


def test_a_prefix_leaves_the_state_that_its_tokens_leave(encoder: TextEncoder) -> None:
    rng, size = random.Random(6), encoder.tokenizer.get_vocab_size()
    for _ in range(300):
        ids = [rng.randrange(size) for _ in range(12)]
        cut, stops = rng.randrange(12), ["ab", "the", " \ufffd"]
        whole, resumed = OutputText(encoder, stops), OutputText(encoder, stops)
        resumed.push(ids[:cut])
        whole.push(ids[:cut])
        assert whole.push(ids[cut:]) == resumed.push(ids[cut:])
        assert (whole.finish(), whole.stopped) == (resumed.finish(), resumed.stopped)
