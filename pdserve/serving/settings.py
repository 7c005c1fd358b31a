"""Every setting of every process, from TOML, environment and flags into frozen models. Reads nothing else.

Precedence: flags, then `PDSERVE_<SECTION>__<FIELD>` in the environment, then the TOML file, then the defaults here.
"""

import os
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Port = Annotated[int, Field(ge=0, le=65535)]
Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Dtype = Literal["bfloat16", "float32"]

_HUB_ID = re.compile(r"(?!.*\.(?i:gguf)$)(\w[\w.-]*/\w[\w.-]*)(@.+)?")


class Section(BaseModel):
    """A frozen group of settings; unknown names are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ModelSettings(Section):
    source: str = "smollm2-135m-instruct"
    """A built-in name, a directory with config.json and safetensors, a .gguf file, or ORG/NAME from Hugging Face."""
    served_name: str = ""
    """What clients call the model; empty: the built-in name, the hub's ORG/NAME, or the path's last part. A directory
    given as PART/PART is named as one of the hub's: write ./m/qwen3 to be served as qwen3."""
    dtype: Dtype = "bfloat16"
    """Of weights and KV: float32 where tests ask for exactness."""
    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")] = "cpu"
    """cpu, cuda or cuda:N."""

    @property
    def name(self) -> str:
        """What clients call the model. Looks at no disk, so that all processes agree: a directory given as PART/PART
        counts as a hub's ORG/NAME (`@revision` left out) unless a ./ is put before it."""
        if self.served_name:
            return self.served_name
        hub_id = _HUB_ID.fullmatch(self.source)
        return hub_id[1] if hub_id else os.path.basename(os.path.abspath(self.source))


class CoordinatorSettings(Section):
    host: str = "127.0.0.1"
    """Address to listen on."""
    http_port: Port = 8000
    """OpenAI API, /health and /metrics; 0 picks a free port."""
    grpc_port: Port = 50051
    """Inference and Fleet; 0 picks a free port."""
    max_queued_requests: Positive = 256
    """Bound of each model's queue by requests (a request with n choices counts n)."""
    max_queued_tokens: Positive = 1_000_000
    """Bound of each model's queue by work: prompt + max_tokens of everything waiting."""
    default_max_tokens: Positive = 1024
    """Where a request names none (never above context − prompt)."""
    default_deadline_s: Seconds = 600.0
    """From arrival, where a request names none."""
    max_deadline_s: Seconds = 3600.0
    """A longer one asked for counts as this."""
    max_choices: Positive = 16
    """n of one request, times its prompts."""
    max_body_bytes: Positive = 4 * 1024 * 1024
    """Of one request; above it: 413."""
    max_stop_strings: Positive = 16
    """Of one request."""
    max_unread_tokens: Positive = 256
    """A reader that falls further behind, and stays there for unread_grace_s, ends as slow_consumer."""
    unread_grace_s: float = Field(default=1.0, ge=0.0, allow_inf_nan=False)
    """See max_unread_tokens."""
    heartbeat_s: Seconds = 2.0
    """How often reservations are renewed at the workers."""
    report_interval_s: Seconds = 1.0
    """The longest gap between two load reports of an idle worker."""
    stalled_after_s: Seconds = 10.0
    """A worker without a report, or without a step while work waits, gets nothing new after this long."""
    drain_s: Seconds = 30.0
    """How long a stop waits for streams to end."""
    api_keys: dict[str, str] = {}
    """API key → tenant. Empty: no key is asked for, one tenant."""


class WorkerSettings(Section):
    coordinators: tuple[str, ...] = ()
    """host:port of each coordinator's gRPC; repeat the flag for several."""
    worker_id: str = ""
    """A name, stable across restarts; empty: role, host and pid."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    advertise_host: str = ""
    """Address that others reach; empty: `host`."""
    control_port: Port = 0
    """Prefill and Decode RPCs; 0 picks a free port."""
    kv_port: Port = 0
    """KvTransfer; 0 picks a free port."""
    threads: Positive = 1
    """Compute threads of the engine; `pdserve serve` gives a worker as many cores."""
    kernels: Literal["auto", "native", "torch"] = "auto"
    """native: compiled for this processor (AVX-512); torch: anywhere, slower. auto: native wherever it can run. Workers
    that exchange KV need the same."""
    attention_precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16 rounds queries and attention weights where native kernels have bf16 dot products: faster prefill; see
    docs/quality.md."""
    cores: tuple[int, ...] = ()
    """Cores the process is pinned to; empty: no pinning."""
    memory_budget_bytes: int = Field(default=0, ge=0)
    """For everything the worker holds; 0: 80% of what is free at start, in host memory at most 4 GiB."""
    memory_headroom_fraction: float = Field(default=0.1, ge=0.0, lt=0.9)
    """Of the budget, kept free."""
    num_blocks: int = Field(default=0, ge=0)
    """KV blocks; 0: as many as the budget allows."""
    block_size: Positive = 16
    """Tokens in a KV block."""
    prefix_cache: bool = True
    """Keep the KV of what was computed for later prompts that begin with the same tokens, while there is room."""
    max_batch_size: Positive = 64
    """Sequences in one decode step."""
    lease_s: Seconds = 10.0
    """A reservation that nobody renews is freed after this long."""
    drain_s: Seconds = 30.0
    """How long a stop waits for requests and transfers to end."""


class PrefillSettings(Section):
    token_budget: Positive = 512
    """Prompt tokens in one step, shared by shortest-remaining-first."""
    max_bypasses: int = Field(default=8, ge=0)
    """Times a prompt may be overtaken before it goes first."""


class ColocatedSettings(Section):
    token_budget: Positive = 128
    """Prompt tokens that ride along with the decode rows of one step."""


class TransferSettings(Section):
    transports: tuple[Literal["local", "shm", "grpc"], ...] = ("local", "shm", "grpc")
    """Allowed ones, best first: within one process; between processes of one host, which lets decode workers read the
    prefill worker's KV pool; over the network."""
    base_deadline_s: Seconds = 2.0
    """For any transfer step, however few its bytes."""
    min_bytes_per_s: Positive = 20_000_000
    """Deadline of a transfer step = base + bytes / this rate."""
    chunk_bytes: Positive = 1024 * 1024
    """Of one message of KV."""
    lease_s: Seconds = 10.0
    """An inbound transfer without progress is given up after this long."""


class LaunchSettings(Section):
    mode: Literal["disaggregated", "colocated"] = "disaggregated"
    """Prefill and decode in processes of their own, or together."""
    prefill: Positive = 1
    """Prefill workers of each model."""
    decode: Positive = 1
    """Decode workers of each model."""
    colocated: Positive = 1
    """Colocated workers of each model, with mode = "colocated"."""
    pin: bool = True
    """Give each CPU worker `threads` cores of its own."""


class Settings(Section):
    """All sections. Each process takes those it needs and hands each component its own."""

    model: ModelSettings = ModelSettings()
    coordinator: CoordinatorSettings = CoordinatorSettings()
    worker: WorkerSettings = WorkerSettings()
    prefill: PrefillSettings = PrefillSettings()
    colocated: ColocatedSettings = ColocatedSettings()
    transfer: TransferSettings = TransferSettings()
    launch: LaunchSettings = LaunchSettings()
    cache_dir: Path = Path("~/.cache/pdserve")
    """Where downloaded models are kept."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Of every process."""
    more_models: tuple[ModelSettings, ...] = ()
    """What a coordinator serves beside `model`, each with pools and a queue of its own: `[[more_models]]` tables with
    the settings of `[model]`, JSON elsewhere. A worker loads `model` alone."""

    @property
    def models(self) -> tuple[ModelSettings, ...]:
        """All that are served."""
        return (self.model, *self.more_models)
