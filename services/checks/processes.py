"""Checks of the number of processes and threads, and of what engines are for."""

from sluice_server.engine.config import EngineConfig
from sluice_server.engine.worker.host.cores import THREADS_A_CORE, find_cores
from sluice_server.services.checks.values import one_of
from sluice_server.services.config import (
    GPU,
    KV_COST,
    MAX_ENGINES,
    MAX_SIZED_ENGINES,
    ROUTING,
    ServiceConfig,
    bad_setting,
)
from sluice_server.services.messages.processes import EngineRole, Role

MAX_PORT = 65_535


def check_engines(engine: EngineConfig, service: ServiceConfig) -> None:
    """Raise ServiceError for engines that cannot be chosen among, or that would share what is one."""
    one_of("routing", service.routing, ROUTING)
    if service.routing == KV_COST and not engine.prefix_caching:
        raise bad_setting("routing", f"{KV_COST} chooses by prefix caches, and --no-prefix-caching has none")
    if service.routing == KV_COST and service.role and not engine.kv_events:
        raise bad_setting("routing", f"{KV_COST} needs --kv-events at every process")
    check_roles(engine, service)
    _check_kv_ports(engine, service)
    num = service.engines
    if not 1 <= num <= MAX_ENGINES:
        raise bad_setting("engines", f"{num} is not in [1, {MAX_ENGINES}]; more need a service of their own")
    if num == 1:
        return
    if engine.device == "cuda" or (engine.device == "auto" and GPU.exists()):
        text = f"{num} would share one GPU; start each with --role engine and a CUDA_VISIBLE_DEVICES of its own, or add"
        raise bad_setting("engines", f"{text} --device cpu")
    if num > MAX_SIZED_ENGINES and not engine.kv_cache_tokens:
        text = f"above {MAX_SIZED_ENGINES}, each of which takes a quarter of the free memory, needs --kv-cache-tokens"
        raise bad_setting("engines", f"{num} is {text}")


def check_roles(engine: EngineConfig, service: ServiceConfig) -> None:
    """Raise ServiceError for engines that are apart for prompts where none can hand them off."""
    one_of("engine_role", service.engine_role, tuple(EngineRole))
    if not 0 <= service.prefill_engines < max(service.engines, 1):
        text = (
            f"{service.prefill_engines} is not in [0, {service.engines - 1}]: one of --engines must go on behind them"
        )
        raise bad_setting("prefill_engines", text)
    name = "prefill_engines" if service.prefill_engines else "engine_role"
    if service.engine_role != EngineRole.BOTH and not service.role:
        raise bad_setting("engine_role", "is for --role engine; --prefill-engines divides those of a whole service")
    if not service.prefill_engines and service.engine_role == EngineRole.BOTH:
        return
    if service.routing != KV_COST:
        raise bad_setting(name, f"needs --routing {KV_COST}: the router decides which prompts are computed apart")
    if not engine.shared_cache_bytes:
        raise bad_setting(name, "needs --shared-cache-bytes: other engines fetch the blocks of a prompt from there")


def _check_kv_ports(engine: EngineConfig, service: ServiceConfig) -> None:
    """Raise ServiceError for ports that there are not, and where no block would travel."""
    offset, port = service.kv_port_offset, service.inbox.rpartition(":")[2]
    if not offset and service.kv_nixl:
        raise bad_setting("kv_nixl", "needs --kv-port-offset: there engines tell each other where blocks are")
    if not offset:
        return
    if not 0 < offset < MAX_PORT:
        raise bad_setting("kv_port_offset", f"{offset} is not in [0, {MAX_PORT - 1}]")
    if not engine.shared_cache_bytes:
        raise bad_setting("kv_port_offset", "needs --shared-cache-bytes: other engines fetch blocks from there")
    if service.role and port.isdecimal() and int(port) + offset > MAX_PORT:
        raise bad_setting("kv_port_offset", f"{offset} and the port of --inbox, {port}, are above {MAX_PORT}")


def check_threads(engine: EngineConfig, service: ServiceConfig) -> None:
    """Raise ServiceError for more threads, or processes of a role, than this machine can use. With `role` set, only
    that role's settings are checked: other roles may run on other machines or under other quotas."""
    wanted: dict[str, int] = {}
    if service.role in ("", Role.ENGINE):
        wanted["threads"] = engine.threads
    if service.role in ("", Role.TOKENIZER):
        wanted |= {"encoding_threads": service.encoding_threads, "media_workers": service.media_workers}
    if not service.role:
        wanted |= {name: getattr(service, name) for name in ("gateways", "tokenizers", "engines", "detokenizers")}
    cores = find_cores()
    for name, value in wanted.items():
        if value > cores.max_threads:
            limit = f"{cores.max_threads}, {THREADS_A_CORE} for each core that can be used here ({cores})"
            raise bad_setting(name, f"{value} is above {limit}; leave it out, or give a number of cores")
