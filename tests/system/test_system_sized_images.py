"""Images of any size through real processes: tokens of `transformers`, two sizes in two turns, and what is cached."""

from pathlib import Path
from typing import Any

import pytest
import torch
from sluice.v1 import types_pb2

from sluice_server.engine.models.vision.config import read_vision
from sluice_server.services.media.pixels import prepare
from sluice_server.services.media.processor import FILE_LIMITS, read_processor
from tests.oracle.image_families import FAMILIES, Family, Picture
from tests.oracle.vision_checkpoints import WORDS_IMAGE_ID
from tests.system.service import serve
from tests.system.test_system_images import NUM, answered, asked, byte_ids, ids_of, picture

TEXT = "what <image> is it?"


def ids_of_turn(path: Path, text: str, *pictures: bytes) -> tuple[list[int], list[Picture]]:
    """The ids of a turn of the user, whose pictures come first, and its pictures."""
    form = read_vision(path).form
    ids, found = [3 + at for at in byte_ids("USER: ")], []
    for one in pictures:
        pixels, grid = prepare(one, read_processor(path, form), FILE_LIMITS)
        found.append(Picture(torch.from_numpy(pixels).flatten(), grid))
        ids += [*form.ids(grid), *(3 + at for at in byte_ids("\n"))]
    return ids + [3 + at for at in byte_ids(f"{text} ")], found


@torch.inference_mode()
def greedy(family: Family, model: Any, ids: list[int], pictures: list[Picture], tokens: list[int]) -> list[int]:  # noqa: ANN401 # untyped
    """What the reference chooses before each of the tokens behind a prompt."""
    whole = torch.tensor([[*ids, *tokens[:-1]]])
    given = family.given(pictures) | ({family.types: (whole == WORDS_IMAGE_ID).int()} if family.types else {})
    model.model.rope_deltas = None
    return [int(one) for one in model(whole, **given).logits[0, len(ids) - 1 :, :WORDS_IMAGE_ID].argmax(-1)]


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_tokens_are_those_of_transformers_in_two_turns(family: Family, tmp_path: Path) -> None:
    model = family.make_served(tmp_path)
    bias = {WORDS_IMAGE_ID + more: -100.0 for more in range(1, 4)}
    wide, tall = picture(1, 60, 30), picture(2, 25, 70, "JPEG")
    options = ("--dtype", "float32", "--max-num-batched-tokens", "32")
    with serve("--model", str(tmp_path), *options) as service, service.stub() as stub:
        first = asked(wide, TEXT, num=NUM)
        first.sampling.logit_bias.update(bias)
        answer = answered(stub, first)
        own, pictures = ids_of_turn(tmp_path, TEXT, wide)
        ids = own + [3 + at for at in byte_ids("ASSISTANT:")]
        tokens = ids_of(answer)
        assert len(tokens) == NUM and tokens == greedy(family, model, ids, pictures, tokens)
        num_image = sum(len(read_vision(tmp_path).form.ids(one.grid)) for one in pictures)
        assert answer.usage.image_tokens == num_image and answer.usage.prompt_tokens == len(ids)
        second = asked(wide, TEXT, num=NUM)
        second.chat.messages.add(role=types_pb2.ROLE_ASSISTANT).parts.add(text="a cat")
        second.chat.messages.extend(asked(tall, "and this?").chat.messages)
        second.sampling.logit_bias.update(bias)
        answer = answered(stub, second)
        said = [3 + at for at in byte_ids("ASSISTANT: a cat ")]
        more, others = ids_of_turn(tmp_path, "and this?", tall)
        ids = own + said + more + [3 + at for at in byte_ids("ASSISTANT:")]
        tokens = ids_of(answer)
        assert tokens == greedy(family, model, ids, [*pictures, *others], tokens)
        assert answer.usage.cached_tokens == len(own) // 32 * 32 > num_image
