"""Architectures that are refused by name: why each is not served. Depends on the standard library only."""

from collections.abc import Mapping

from sluice_server.engine.errors import unsupported

_LATENT = "multi-head latent attention (MLA) is not built"
_CHUNKED = "attention in chunks, with a temperature by position, is not built"
NOT_BUILT: Mapping[str, str] = {
    "DeepseekForCausalLM": "DeepSeek-MoE's layers are not built",
    "DeepseekV2ForCausalLM": _LATENT,
    "DeepseekV3ForCausalLM": _LATENT,
    "Llama4ForCausalLM": _CHUNKED,
    "Llama4ForConditionalGeneration": _CHUNKED,
    "Phi3SmallForCausalLM": "block-sparse attention is not built",
    "PhimoeForCausalLM": "its router, which samples two experts one after the other, is not built",
}


def check_built(architecture: str) -> None:
    """Raises ServiceError UNIMPLEMENTED, before any other field is read, for an architecture known not to be built."""
    reason = NOT_BUILT.get(architecture)
    if reason is not None:
        raise unsupported("architecture", f"architecture {architecture!r} is not supported: {reason}")
