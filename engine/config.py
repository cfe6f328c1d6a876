"""The engine's settings: frozen, read once, never written to. Computed values (block count, dtype) are returned by the
functions that compute them. Stdlib only."""

import dataclasses
from collections.abc import Mapping
from typing import TypeVar

_T = TypeVar("_T")
QUANTIZATIONS = ("none", "int8", "int4", "w8a8", "fp8")
CACHE_DTYPES = ("float32", "bfloat16", "int8", "fp8")
ATTENTION_BACKENDS = ("auto", "triton", "fa3", "flashinfer")
# Sequences and tokens of a step, and tokens of vectors beside decodes. A GPU's products wait for weights up to some 300
# tokens a step, and its recorded steps cost little for each more; on a CPU every token takes its time, for which the
# others of the step wait: 8 of a small model make the time between two tokens of its streams 1.2 times as long.
STEP_SIZES = {"cpu": (64, 512, 8), "cuda": (256, 2048, 64)}
SUM_DTYPES = ("float32", "bfloat16", "int8")  # of `engine.parallel.sums_gloo`


AUTO = {"auto": -(1 << 31)}  # the number that stands for the word; written out, it is refused


def option(default: _T, text: str, words: Mapping[str, int] | None = None) -> _T:
    """Returns a dataclass field with a help text for the command line, and the words that it takes in place of
    numbers."""
    # typed as the value, like dataclasses.field itself
    return dataclasses.field(default=default, metadata={"help": text, "words": words or {}})


@dataclasses.dataclass(frozen=True, slots=True)
class EngineConfig:
    """The settings of an engine, beside the checkpoint itself."""

    device: str = option("auto", "auto, cpu or cuda; auto takes CUDA where there is one")
    dtype: str = option("auto", "auto, float32 or bfloat16; auto takes bfloat16 where the device computes in it")
    quantization: str = option(
        "none",
        "none, int8 or int4: weights rounded when loaded, and on a CPU activations rounded to 8 bits in each step; on "
        "CUDA also w8a8 (int8) or fp8, which round activations there",
    )
    kv_cache_dtype: str = option(
        "auto",
        "auto, float32, bfloat16, int8, or on CUDA fp8 (e4m3); auto is --dtype, and on a CPU beside --quantization "
        "bfloat16 unless --dtype is float32",
    )
    batch_invariant: bool = option(
        False,
        "tokens do not depend on the other requests of a step: on CUDA by slower kernels with one order of summation; "
        "on a CPU they never do, or the setting is refused",
    )
    attention_backend: str = option(
        "triton",
        "what computes attention on CUDA: triton (our kernels), fa3 or flashinfer (installed packages), or auto: the "
        "fastest of these at start, for prompts and for decoding apart",
    )
    max_model_len: int = option(0, "context length in tokens; 0 is the model's own")
    max_num_seqs: int = option(0, "the most sequences that run at once; 0 is 64, on CUDA 256")
    max_num_batched_tokens: int = option(
        0, "the most tokens computed in one step (chunked prefill); 0 is 512, on CUDA 2048"
    )
    max_num_pooling_tokens: int = option(
        0, "the most prompt tokens of embeddings, classes and scores in a step that also decodes; 0 is 8, on CUDA 64"
    )
    block_size: int = option(
        32,
        "tokens in a KV cache block; auto, for a service of one model: 16, 32, 64 or 128, whichever would have saved "
        "most in the run before",
        AUTO,
    )
    gpu_memory_utilization: float = option(0.9, "share of a GPU's memory that may be used: weights, steps and cache")
    kv_cache_tokens: int = option(0, "tokens the KV cache holds; 0 sizes it from memory and max_num_seqs")
    kv_cache_max_tokens: int = option(
        0, "tokens that the KV cache may grow to while it serves (`sluice cache resize`); 0 is its size at start"
    )
    kv_cache_min_tokens: int = option(
        0, "tokens that the KV cache keeps where the memory watch makes it smaller; 0 is one request of full length"
    )
    prefix_caching: bool = option(True, "share the KV cache of equal prompt prefixes of one tenant")
    kv_events: bool = option(False, "report what the prefix cache holds to gateways, for routers in front of several")
    host_cache_bytes: int = option(0, "host memory for cache blocks that were evicted or preempted; 0 is off")
    disk_cache_dir: str = option("", "directory for cache blocks that host memory evicts; needs --host-cache-bytes")
    disk_cache_bytes: int = option(0, "the most bytes in --disk-cache-dir")
    disk_cache_ttl_s: float = option(
        0.0,
        "seconds after which a block in --disk-cache-dir is deleted that was not used; 0 keeps it while there is room",
    )
    disk_cache_save_s: float = option(
        5.0, "the most seconds in which an engine that ends writes its cache to --disk-cache-dir; 0 writes nothing then"
    )
    shared_cache_bytes: int = option(
        0, "memory for copies of cache blocks that the other engines of this host fetch instead of computing; 0 is off"
    )
    kv_store: str = option(
        "", "path of the socket of `sluice kvstore`, which keeps this host's cache blocks; needs --shared-cache-bytes"
    )
    weights_offload_bytes: int = option(
        0,
        "bytes of the layers' weights that do not stay in memory: each step reads them, layer by layer, from a file in "
        "the user's cache folder, or for a GPU from memory of the host; 0 is off",
    )
    threads: int = option(0, "compute threads, at most 4 per core; 0 takes the cores that the process may use")
    scheduling_policy: str = option("priority", "order of requests: priority (with ageing), fcfs, sjf, fair, deadline")
    priority_ageing_s: float = option(5.0, "policy priority: seconds of waiting that outweigh one level of priority")
    starvation_bound_s: float = option(30.0, "policy sjf: seconds after which no newer request overtakes one")
    tenant_weights: str = option("", "policy fair: tenant=weight, comma-separated; 1 for every other tenant")
    admission_watermark: float = option(
        0.01, "share of the cache that admission keeps free by its prediction; below 0 it admits more than may fit"
    )
    max_queued_requests: int = option(4096, "the most requests waiting in the engine; more are refused")
    max_queued_tokens: int = option(1 << 24, "the most prompt tokens waiting in the engine; more are refused")
    pause_hold_s: float = option(5.0, "seconds that a paused generation keeps cache blocks that no other request needs")
    speculation: str = option(
        "none",
        "proposer of draft tokens: none, ngram (prompt look-up), grammar (what a constraint forces), draft (a model) "
        "or eagle (a head)",
    )
    draft_model: str = option(
        "", "speculation draft: a smaller model of the same vocabulary; eagle: an EAGLE-3 head; named as in --model"
    )
    draft_length: str = option("adaptive", "adaptive: as many as make it faster, or none; fixed: always the most")
    max_draft_tokens: int = option(8, "the most tokens drafted for one sequence in one step, 1 to 64")
    enable_prompt_embeds: bool = option(
        False, "take prompt embeddings: requests may bring hidden states in the place of their first tokens"
    )
    images: bool = option(True, "take images where the model's vision tower is served; --no-images saves its memory")
    encoder_cache_bytes: int = option(
        64 << 20,
        "memory for what the vision tower computed of images, so that one that comes again is not encoded again",
    )
    max_adapters: int = option(
        0,
        "slots for adapters (LoRA) in a GPU's memory, as many as running requests may have, at most 255; a CPU "
        "computes with any in host memory; 0 takes no requests with one",
    )
    adapter_dir: str = option(
        "", "directory of adapters: folders as PEFT writes them, of which each is loaded when a request names it"
    )
    adapter_hub: str = option(
        "",
        "hub repositories of which adapters may be downloaded, comma-separated: ORG/NAME, or ORG/* for all of ORG",
    )
    adapter_bytes: int = option(1 << 30, "memory of a GPU for adapters, allocated at the start")
    adapter_host_bytes: int = option(1 << 30, "the most bytes of adapters that are kept in host memory")
    adapter_turn_s: float = option(
        1.0, "seconds that a request waits for its adapter before others have to make room for it"
    )
    encoder_share: float = option(
        1.0,
        "encoding of images takes no more than this share of the steps' time, while requests are computed: more of it "
        "serves more images a second, with longer gaps in streams meanwhile",
    )
    calibration: str = option(
        "", "file of `sluice calibrate`: the ids that --quantization int4 observes; without it random ones"
    )
    plugins: str = option(
        "",
        "entry points of packages, comma-separated: the models, logits processors and sampling strategies to allow",
    )
    max_draft_width: int = option(
        1, "speculation draft or eagle: drafts that may follow the same token, 1 to 8; 1 is a chain"
    )
    tensor_parallel_size: int = option(1, "ranks that share every layer: heads, intermediate columns, vocabulary")
    pipeline_parallel_size: int = option(1, "stages that share the layers; each has --tensor-parallel-size ranks")
    expert_parallel: bool = option(False, "ranks own whole experts of a mixture, not a part of each")
    sum_shards: int = option(
        0,
        "partial products that row-parallel projections are added up from, in one order: sizes that divide it give "
        "equal bits; 0 is one for each rank",
    )
    sum_dtype: str = option(
        "float32", f"form in which partial sums travel between hosts: {', '.join(SUM_DTYPES)}; all but the first round"
    )

    def sized(self, device: str) -> "EngineConfig":
        """Returns the same settings with the size of a step on that device, "cpu" or "cuda", where they leave it
        open."""
        num_seqs, num_tokens, num_pooling = STEP_SIZES[device]
        return dataclasses.replace(
            self,
            max_num_seqs=self.max_num_seqs or num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens or num_tokens,
            max_num_pooling_tokens=self.max_num_pooling_tokens or num_pooling,
        )

    @property
    def num_ranks(self) -> int:
        """The number of ranks of all stages."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


DEFAULTS = EngineConfig()  # other defaults of the same meaning are taken from here
