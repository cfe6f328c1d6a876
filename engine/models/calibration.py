"""Token ids that are observed when weights are rounded, in place of random ones: a file that `sluice calibrate` writes.

The file is JSON: {"vocab_size": of the model, "token_ids": the ids of a text}.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.models.config import ModelConfig

MIN_IDS, MAX_IDS = 16, 4096
MAX_BYTES = 1 << 20


def write_calibration(path: Path, vocab_size: int, ids: Sequence[int]) -> None:
    """Writes a file of these ids. Raises OSError."""
    path.write_text(json.dumps({"vocab_size": vocab_size, "token_ids": list(ids)}) + "\n")


def with_calibration(config: ModelConfig, file: str, weights: str) -> ModelConfig:
    """Returns the configuration with the ids of a file ("" for none); `weights` is the format that they round to.

    Raises ServiceError INVALID_SETTING for a file that is of no use, or of another model.
    """
    if not file:
        return config
    if weights != "int4" or config.stored is not None:
        raise _wrong("only weights that this server rounds by --quantization int4 are rounded by what was observed")
    path = Path(file).expanduser()
    try:
        with path.open("rb") as opened:
            values = json.loads(opened.read(MAX_BYTES))
    except OSError as error:
        raise _wrong(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise _wrong(f"{path} is no file that `sluice calibrate` wrote") from error
    if not isinstance(values, dict) or values.get("vocab_size") != config.vocab_size:
        said = values.get("vocab_size") if isinstance(values, dict) else None
        raise _wrong(f"{path} is for a vocabulary of {said!r:.20}, and the model has {config.vocab_size}")
    ids = values.get("token_ids")
    if not isinstance(ids, list) or not MIN_IDS <= len(ids) <= MAX_IDS:
        raise _wrong(f"{path}: token_ids must be a list of {MIN_IDS} to {MAX_IDS} ids")
    if not all(type(one) is int and 0 <= one < config.vocab_size for one in ids):
        raise _wrong(f"{path}: token_ids must be numbers below {config.vocab_size}")
    return dataclasses.replace(config, calibration=tuple(ids))


def _wrong(message: str) -> ServiceError:
    return ServiceError(Code.INVALID_ARGUMENT, "INVALID_SETTING", f"--calibration: {message}", field="calibration")
