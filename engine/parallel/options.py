"""The options of ranks: a group's shape from the settings, and what it cannot have."""

from collections.abc import Callable, Mapping

from sluice_server.engine.config import DEFAULTS, SUM_DTYPES, EngineConfig
from sluice_server.engine.parallel.shape import ParallelShape, unusable

# By option: whether a group of ranks cannot have it.
NOT_IN_GROUPS: Mapping[str, Callable[[EngineConfig], bool]] = {
    "shared_cache_bytes": lambda config: config.shared_cache_bytes > 0,
    "weights_offload_bytes": lambda config: config.weights_offload_bytes > 0,
}


# By option: whether ranks with a GPU each cannot have it.
NOT_ON_DEVICES: Mapping[str, Callable[[EngineConfig], bool]] = {
    "pipeline_parallel_size": lambda config: config.pipeline_parallel_size > 1,
    "expert_parallel": lambda config: config.expert_parallel,
    "max_adapters": lambda config: config.max_adapters > 0,
    "attention_backend": lambda config: config.attention_backend != DEFAULTS.attention_backend,
}


def shape_of(config: EngineConfig) -> ParallelShape:
    """Returns the shape of the group that the settings ask for, from the place of its first member.

    Raises ServiceError INVALID_SETTING naming the option for sizes that exclude one another.
    """
    shape = ParallelShape(
        tensor_size=config.tensor_parallel_size,
        pipeline_size=config.pipeline_parallel_size,
        sum_shards=config.sum_shards,
        expert_parallel=config.expert_parallel,
    )
    return shape.of_member(0)


def check_parallel(config: EngineConfig) -> ParallelShape:
    """Returns `shape_of` the settings. Raises ServiceError INVALID_SETTING for what such a group cannot have."""
    shape = shape_of(config)
    if shape.expert_parallel and shape.tensor_size == 1:
        text = "shares out experts among tensor-parallel ranks, and there is one: needs --tensor-parallel-size above 1"
        raise unusable("expert_parallel", f"{text}, or leave it out")
    if config.sum_dtype not in SUM_DTYPES:
        raise unusable("sum_dtype", f"{config.sum_dtype!r} is not one of {', '.join(SUM_DTYPES)}")
    if config.sum_dtype != DEFAULTS.sum_dtype and shape.tensor_size == 1:
        text = f"{config.sum_dtype} is for sums that travel between hosts, and --tensor-parallel-size 1 has none"
        raise unusable("sum_dtype", f"{text}: leave it out")
    name = next((one for one, has in NOT_IN_GROUPS.items() if shape.members > 1 and has(config)), "")
    if name:
        text = f"{getattr(config, name)} is not supported beside several ranks yet"
        raise unusable(name, f"{text}: leave one of the two out")
    if config.device.startswith("cuda"):  # "auto" is known where the device is
        check_on_device(config, "cuda")
    return shape


def check_on_device(config: EngineConfig, device: str) -> None:
    """Raises ServiceError INVALID_SETTING for what a group on devices of that type, "cpu" or "cuda", does not have."""
    if device == "cpu" or config.num_ranks == 1:
        return
    name = next((one for one, has in NOT_ON_DEVICES.items() if has(config)), "")
    if name:
        text = f"{getattr(config, name)} is not supported over several GPUs yet: leave it out, or use --device cpu"
        raise unusable(name, text)
