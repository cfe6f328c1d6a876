"""Every SDK sends a picture in a chat, and gets the tokens of the same request in the contract's own messages."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.driver import told
from tests.conformance.sdks import Sdk
from tests.oracle.vision_checkpoints import WORDS_IMAGE_ID, make_served_llava
from tests.system.service import Service, serve
from tests.system.test_system_images import answered, asked, ids_of, picture

NUM = 12


@pytest.fixture(scope="module")
def pictured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service that takes pictures."""
    path = tmp_path_factory.mktemp("llava")
    make_served_llava(path)
    with serve("--model", str(path), "--dtype", "float32") as running:
        yield running


@pytest.mark.parametrize("call", ["generate", "stream"])
def test_a_picture_in_a_chat(sdk: Sdk, call: str, pictured: Service, tmp_path: Path) -> None:
    found = []
    for seed in (1, 2):
        (tmp_path / "picture").write_bytes(picture(seed))
        wanted = asked(picture(seed), "what is it?", num=NUM)
        del wanted.sampling.logit_bias[WORDS_IMAGE_ID]  # drivers set none
        with pictured.stub() as stub:
            want = ids_of(answered(stub, wanted))
        given = {"text": "what is it?", "image": str(tmp_path / "picture"), "max_tokens": NUM}
        end = told(sdk, pictured.address, call=call, **given)
        assert (end["error"], end["token_ids"], end["completion_tokens"]) == (None, want, NUM)
        found.append(want)
    assert found[0] != found[1]
