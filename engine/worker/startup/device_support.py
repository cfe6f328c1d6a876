"""Checks once at start whether a device can serve a model with these settings, and reports what cannot.

Takes a model's configuration and the relevant settings.
"""

import importlib.util

import torch

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.errors import Code, ServiceError
from sluice_server.engine.models.config import ModelConfig
from sluice_server.engine.worker.host.gpus import no_gpu
from sluice_server.engine.worker.startup import compiler
from sluice_server.engine.worker.startup.formats import Formats, unusable
from sluice_server.kernels.contract import is_batch_invariant
from sluice_server.kernels.cpu import builds
from sluice_server.kernels.layout.ragged import MAX_TREE
from sluice_server.kernels.triton.support import FP8_SINCE, too_wide, unsupported

MAX_STEP_TOKENS = 65_535  # programs of a launch in its second dimension, which some kernels take for tokens
ON_CUDA = "tokens do not depend on the batch: products and attention are summed in one order, which is slower"
ON_CPU = "tokens do not depend on the batch: on this CPU they never do"


def check_gpu(model: ModelConfig, formats: Formats, block_size: int, device: torch.device) -> None:
    """Raises ServiceError if our kernels do not support the model; the message says what they do support.

    Devices other than CUDA pass.
    """
    if device.type != "cuda":
        return
    if importlib.util.find_spec("triton") is None:
        raise _unusable("--device cuda needs Triton, which is not installed: pip install triton, or use --device cpu")
    if (lacking := compiler.missing()) is not None:
        raise _unusable(f"--device cuda: {lacking}; or use --device cpu")
    major, minor = torch.cuda.get_device_capability(device)
    check_shape(model, formats, block_size, 10 * major + minor)


def check_shape(model: ModelConfig, formats: Formats, block_size: int, capability: int) -> None:
    """Does the same for a GPU of that compute capability, 90 for 9.0."""
    group = model.num_heads // model.num_kv_heads
    reason = unsupported(capability, formats.dtype, model.head_dim, group, block_size)
    if reason is None and _rounds_activations(model, formats):
        reason = too_wide(max(model.hidden_size, model.intermediate_size, model.num_heads * model.head_dim))
    if reason is not None:
        raise _unusable(f"--device cuda does not support {reason} supported; or use --device cpu")
    if formats.fp8_setting and capability < FP8_SINCE:
        text = f"needs a GPU of compute capability {FP8_SINCE / 10} or newer (L40, H100); this one is {capability / 10}"
        raise _unusable(f"{formats.fp8_setting} {text}: take int8")


def check_step(num_tokens: int, device: torch.device) -> None:
    """Raises ServiceError if a step of so many tokens is more than our kernels compute."""
    if device.type == "cuda" and num_tokens > MAX_STEP_TOKENS:
        text = f"{num_tokens} tokens a step on {device}: at most {MAX_STEP_TOKENS} are supported"
        raise unusable("max_num_batched_tokens", text)


def check_invariance(config: EngineConfig, head_dim: int, device: torch.device) -> tuple[str, ...]:
    """Returns the notes for the operator on `--batch-invariant`, if it is set.

    Raises ServiceError naming the flag and an alternative.
    """
    if not config.batch_invariant:
        return ()
    claims = is_batch_invariant(device, head_dim, is_fixed=True)
    if broken := [name for name, is_kept in claims.items() if not is_kept]:
        text = f"{', '.join(broken)} depend on the batch on {device} without sluice's kernels for heads of {head_dim}"
        advice = (
            "leave it out" if builds.is_available() else "install sluice again beside a C++ compiler, or leave it out"
        )
        raise unusable("batch_invariant", f"{text}; {advice}")
    if device.type == "cpu":
        return (ON_CPU,)
    if config.max_draft_width > 1:  # accepted tokens of a tree were summed together with rejected ones
        raise unusable("batch_invariant", f"with --max-draft-width {config.max_draft_width} on {device}: take 1")
    return (ON_CUDA,)


def choose_device(name: str) -> torch.device:
    """Returns the device of that name; auto prefers CUDA. Raises ServiceError if CUDA is requested and not usable."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise no_gpu()
    return torch.device("cuda")


def check_trees(config: EngineConfig, model: ModelConfig, device: torch.device) -> None:
    """Raises ServiceError if drafts are to branch and the GPU kernels cannot verify that."""
    least = min((size for size in model.windows if size is not None), default=MAX_TREE)
    if device.type != "cpu" and config.max_draft_width > 1 and least < MAX_TREE:
        text = f"{config.max_draft_width} on {device} with a sliding window of {least} tokens: use 1"
        raise _unusable(f"--max-draft-width: {text}; windows of {MAX_TREE} and more, or none, are supported")


def _rounds_activations(model: ModelConfig, formats: Formats) -> bool:
    """Returns whether a row of activations is rounded to 8 bits."""
    return formats.weights in ("w8a8", "fp8") or (model.stored is not None and model.stored.method == "fp8")


def _unusable(message: str) -> ServiceError:
    return ServiceError(Code.FAILED_PRECONDITION, "INVALID_SETTING", message)
