"""Gemma 3's images through real processes: ids, pixels and tokens of `transformers`, in two turns."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from sluice.v1 import types_pb2

from tests.oracle.image_families import GEMMA3
from tests.oracle.vision_checkpoints import WORDS_IMAGE_ID
from tests.system.service import serve
from tests.system.test_system_images import NUM, answered, asked, ids_of, picture

TEXT = "what <start_of_image> is <image> it?\n"  # words of images, typed: they stay text
NEAR = "\nand this?"  # newlines beside an image's own are encoded with them
BARRED = range(WORDS_IMAGE_ID + 1, WORDS_IMAGE_ID + 4)


def processor_of(path: Path) -> Any:  # noqa: ANN401 # untyped
    """The reference's processor for a checkpoint."""
    words = {"image_token": "<image>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    kind: Any = transformers.PreTrainedTokenizerFast
    tokenizer = kind(tokenizer_file=str(path / "tokenizer.json"), extra_special_tokens=words, pad_token="<unk>")
    images: Any = transformers.Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
    return transformers.Gemma3Processor(images, tokenizer, image_seq_length=16)


@torch.inference_mode()
def greedy(model: Any, given: dict[str, Any], ids: list[int], tokens: list[int]) -> list[int]:  # noqa: ANN401 # untyped
    """What the reference chooses before each of the tokens behind a prompt."""
    whole = torch.tensor([[*ids, *tokens[:-1]]])
    images = {"pixel_values": given["pixel_values"], "token_type_ids": (whole == WORDS_IMAGE_ID).int()}
    return [int(one) for one in model(whole, **images).logits[0, len(ids) - 1 :, :WORDS_IMAGE_ID].argmax(-1)]


def processed(path: Path, text: str, *files: bytes) -> tuple[dict[str, Any], list[int]]:
    """What the processor makes of a rendered chat and its pictures, and the ids alone."""
    pictures = [Image.open(io.BytesIO(one)) for one in files]
    made = processor_of(path)(text=[text], images=[pictures], return_tensors="pt", add_special_tokens=False)
    return made, made["input_ids"][0].tolist()


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_tokens_are_those_of_transformers_in_two_turns(ranks: int, tmp_path: Path) -> None:
    model = GEMMA3.make_served(tmp_path)
    wide, tall = picture(1, 60, 30), picture(2, 25, 70, "JPEG")
    options = ("--dtype", "float32", "--max-num-batched-tokens", "12", "--block-size", "8")  # fewer than an image has
    over = () if ranks == 1 else ("--tensor-parallel-size", str(ranks), "--allow-shared-cores")
    with serve("--model", str(tmp_path), *options, *over) as service, service.stub() as stub:
        first = asked(wide, "what is it?\n", num=NUM)
        first.sampling.logit_bias.update(dict.fromkeys(BARRED, -100.0))
        answer = answered(stub, first)
        turn = "USER: <start_of_image>what is it?\n "
        given, ids = processed(tmp_path, f"{turn}ASSISTANT:", wide)
        tokens = ids_of(answer)
        assert len(tokens) == NUM and tokens == greedy(model, given, ids, tokens)
        assert (answer.usage.image_tokens, answer.usage.prompt_tokens) == (16, len(ids))
        second = asked(wide, "what is it?\n", num=NUM)
        second.chat.messages.add(role=types_pb2.ROLE_ASSISTANT).parts.add(text="a cat")
        second.chat.messages.extend(asked(tall, NEAR).chat.messages)
        second.sampling.logit_bias.update(dict.fromkeys(BARRED, -100.0))
        answer = answered(stub, second)
        whole = f"{turn}ASSISTANT: a cat USER: <start_of_image>{NEAR} ASSISTANT:"
        given, ids = processed(tmp_path, whole, wide, tall)
        tokens = ids_of(answer)
        assert tokens == greedy(model, given, ids, tokens)
        assert answer.usage.prompt_tokens == len(ids) and answer.usage.cached_tokens > 16
        typed = answered(stub, asked(wide, TEXT, num=1)).usage
        assert typed.image_tokens == 16  # one image: what was typed has no place of its own
