"""The settings of a gateway, as frozen values. Reads no file, no environment variable and no argument."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from sluice_server.engine.models.labels import LabelsConfig
from sluice_server.engine.request import Limits, SamplingParams
from sluice_server.services.checkpoint.pooling_files import PoolingFiles
from sluice_server.services.config import DEFAULTS
from sluice_server.services.gateway.access.tls_files import TlsFiles
from sluice_server.services.gateway.contract.options import OptionMemo
from sluice_server.services.gateway.tokenizer_files import NO_FILES, TokenizerFiles


@dataclasses.dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model behind this gateway.

    Attributes:
        id: the model name in requests.
        revision: exact name of its weights and configuration; "" until a probe has come back from the ring.
        context_length: prompt plus output tokens at most.
        eos_ids: ids that end an output.
        defaults: the model's values of absent sampling parameters.
        architecture: name of the architecture, for display.
        label: the operator's name of the revision. Requests may use it in place of `revision`, except to continue one.
        longest_token: bytes of text that one token stands for at most; 0 if unknown.
        created_s: when the newest of its configuration files was written, in seconds since 1970; 0 if unknown.
        vectors: how Embed pools where a request does not say it.
        vector_width: components of a vector.
        generates: whether it generates text; else it is for vectors or classes only.
        tokenizer: the files that its tokenizer is read from.
        labels: of its classification head; None without one.
        instruction: the first turn of what a model reads that answers with a word; "" for none.
        aliases: other names that requests may give it.
    """

    id: str
    revision: str
    context_length: int
    eos_ids: tuple[int, ...] = ()
    defaults: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    architecture: str = ""
    label: str = ""
    longest_token: int = 0
    created_s: int = 0
    vectors: PoolingFiles = dataclasses.field(default_factory=PoolingFiles)
    vector_width: int = 0
    generates: bool = True
    tokenizer: TokenizerFiles = NO_FILES
    labels: LabelsConfig | None = None
    instruction: str = ""
    aliases: frozenset[str] = frozenset()

    def is_named(self, name: str) -> bool:
        """Whether requests may give it this name."""
        return name == self.id or name in self.aliases


@dataclasses.dataclass(frozen=True, slots=True)
class GatewaySettings:
    """All settings of a gateway. Those that are also options of the command line take their default from there.

    Attributes:
        gateway_id: key of the peer table; the `origin` of every request.
        listen: host:port or unix:/path; port 0 takes a free one.
        tls: files of the certificate; None is plaintext, which is allowed on this host only, unless `insecure`.
        vllm_listen: where `vllm.grpc.engine` is served, whose callers bring no key; "" is nowhere.
        vllm_tenant: the tenant of all its callers, unless their certificates name others.
        kv_events: whether engines report what their prefix caches hold.
        access_file: file of tenants, keys and quotas; None admits every caller as one tenant.
        api_keys: keys of the one tenant where there is no access file, or their digests; () admits every caller.
        num_gateways: gateways that share the quotas.
        peers: gRPC targets of all gateways by id, for calls about generations that another gateway owns.
        peer_socket: path of the Unix socket on which other gateways and edges reach this one; "" for none.
        peer_secret: proves that a call was forwarded by another gateway; "" accepts no forwarded calls.
        epoch: number of this boot of the gateway, in the envelope of every request.
        stages: ids of the tokenizers, engines and detokenizers, each sorted.
        gateways: ids of the gateways that this one knows.
        routing: how the engine of a request is chosen; see `requests.engines`.
        hedging_delay_s: silence after which a request is sent to a second engine as well; 0 for never.
        recovery_timeout_s: how long open requests wait for a lost process to come back.
        model_wait_s: how long requests wait for a model that sleeps or is being loaded.
        trust_chat_content: content of chats may write control tokens, for all tenants.
        trust_request_chat_template: a request may bring its own chat template.
        max_open_requests, max_reserved_tokens: admission limits; tokens are the estimated prompt plus max_tokens.
        probe_timeout_s: silence after which the ring counts as lost; ten engine steps if that is longer.
        media_hosts: hosts from which images are fetched by their URLs; none: URLs are refused.
        image_store_bytes: bytes of images that are kept for requests that name them by digest.
        max_open_image_bytes: admission limit: bytes of images that open requests hold.
        stall_timeout_s: a reader that takes nothing for so long, while deltas wait for it, is broken off.
        grace_s: time that running generations get when a Drain call names none.
        max_connection_age_s: age at which clients are told to reconnect, so that load spreads over gateways.
        max_history_deltas, max_history_bytes: limits on the kept deltas of one generation that outlives its reader.
        max_stream_generations, max_stream_frames_per_s: limits of one Converse stream.
        max_connections: further ones are closed at once, so that file numbers are left for the gateway's other work.
        max_slot_deltas, max_slot_bytes: a reader with more than this unsent is broken off within two probe intervals.
    """

    gateway_id: str
    model: ModelInfo
    limits: Limits
    listen: str = DEFAULTS.listen
    tls: TlsFiles | None = None
    insecure: bool = DEFAULTS.insecure
    vllm_listen: str = DEFAULTS.vllm_listen
    vllm_tenant: str = DEFAULTS.vllm_tenant
    kv_events: bool = False
    access_file: Path | None = None
    api_keys: tuple[str, ...] = ()
    num_gateways: int = DEFAULTS.gateways
    peers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    peer_socket: str = ""
    peer_secret: str = DEFAULTS.peer_secret
    epoch: int = 0
    stages: tuple[tuple[str, ...], ...] = ((), (), ())
    gateways: tuple[str, ...] = ()
    routing: str = DEFAULTS.routing
    hedging_delay_s: float = DEFAULTS.hedging_delay_ms / 1000
    recovery_timeout_s: float = DEFAULTS.recovery_timeout_s
    model_wait_s: float = DEFAULTS.model_wait_s
    version: str = "0.1.0"
    trust_chat_content: bool = DEFAULTS.trust_chat_content
    trust_request_chat_template: bool = DEFAULTS.trust_request_chat_template
    max_open_requests: int = DEFAULTS.max_open_requests
    max_reserved_tokens: int = 1 << 22
    media_hosts: frozenset[str] = frozenset()
    image_store_bytes: int = DEFAULTS.image_store_bytes
    max_open_image_bytes: int = DEFAULTS.max_open_image_bytes
    max_chat_messages: int = 4096
    max_token_ids: int = 1 << 18
    max_embed_inputs: int = 2048
    probe_interval_s: float = DEFAULTS.probe_interval_s
    probe_timeout_s: float = DEFAULTS.probe_timeout_s
    stall_timeout_s: float = 10.0
    max_slot_deltas: int = 256
    max_slot_bytes: int = 64 << 10
    max_history_deltas: int = 1024
    max_history_bytes: int = 256 << 10
    max_stream_generations: int = 256
    max_stream_frames_per_s: int = 2000
    grace_s: float = DEFAULTS.grace_s
    max_connection_age_s: float = DEFAULTS.max_connection_age_s
    audit_log: str = DEFAULTS.audit_log
    reuse_port: bool = False
    reflection: bool = DEFAULTS.reflection
    max_receive_bytes: int = 16 << 20
    max_send_bytes: int = 64 << 20
    max_metadata_bytes: int = 16 << 10
    max_concurrent_streams: int = 2048  # per connection
    max_connections: int = 1 << 20
    max_connections_per_address: int = 1 << 20
    options: OptionMemo = dataclasses.field(init=False, repr=False, compare=False)  # of these limits and this model

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", OptionMemo(self.limits, self.model.defaults, self.model.eos_ids))
