"""Measures one configuration, in a process that was set up for it: every cell, and the machine's limits before and
after them."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from pdserve.core.model_files import open_model_files
from pdserve.engine.loading import EngineConfig, LoadedEngine, load_engine
from pdserve.engine.memory import MemoryLimits
from pdserve.engine.model.interface import Profile
from pdserve.engine.paged_kv import TORCH_DTYPES
from pdserve.engine.sampler import sample_rows
from pdserve.engine.sequence import Sequence
from pdserve_bench.engine.costs import ModelCosts
from pdserve_bench.engine.plan import WARM_UP_STEPS, Task
from pdserve_bench.engine.rates import measure_limits
from pdserve_bench.engine.results import ConfigurationResult, DecodeCell, Limits, PrefillCell, Shares, Spread
from pdserve_bench.engine.sequences import FILL_CHUNK, SequenceMaker, num_blocks_needed, run_prompt, run_step
from pdserve_bench.foreign_cpu import Measured, quietest

_log = logging.getLogger(__name__)


def measure(task: Task) -> ConfigurationResult:
    """Raises PdserveError where the model cannot be loaded so."""
    return _Measurement(task).run()


@dataclass(frozen=True, slots=True)
class _Timed:
    """Calls' times, and what the model says of its part in them all; None where it keeps no account."""

    times_s: list[float]
    profile: Profile | None


class _Measurement:
    def __init__(self, task: Task) -> None:
        torch.set_num_threads(task.configuration.num_threads)
        self._workload, self._configuration = task.workload, task.configuration
        self._dtype = TORCH_DTYPES[task.configuration.dtype]
        self._costs = ModelCosts(open_model_files(task.workload.source).config, task.configuration.dtype)
        self._engine = self._load()
        self._maker = SequenceMaker(self._engine, task.workload)

    def run(self) -> ConfigurationResult:
        before = self._limits()
        decode = tuple(
            self._decode_cell(batch, context) for context in self._workload.contexts for batch in self._workload.batches
        )
        prefill = tuple(cell for num_tokens in self._workload.prompt_lens for cell in self._prefill_cells(num_tokens))
        return ConfigurationResult(
            configuration=self._configuration,
            model_name=self._workload.model_name,
            fingerprint=self._engine.model_info.fingerprint,
            evaluation_id=self._engine.model_info.evaluation_id,
            kv_inner_order=self._engine.paged_kv.layout.inner_order,
            weight_bytes=self._costs.weight_bytes,
            kv_bytes_per_token=self._costs.kv_bytes(1),
            flops_per_token=self._costs.prefill_flops(2) - self._costs.prefill_flops(1),
            limits=before.best(self._limits()),
            decode=decode,
            prefill=prefill,
        )

    def _load(self) -> LoadedEngine:
        workload = self._workload
        config = EngineConfig(
            source=workload.source,
            name=workload.model_name,
            dtype=self._configuration.dtype,
            block_size=workload.block_size,
            memory=MemoryLimits(num_blocks=num_blocks_needed(workload)),
            max_step_tokens=max((FILL_CHUNK, *workload.chunks, *workload.batches)),
            max_step_samples=max((1, *workload.batches)),
            attention_precision=self._configuration.attention,
        )
        return load_engine(config)

    def _limits(self) -> Limits:
        limits = measure_limits(self._costs, self._dtype, self._workload.max_tries)
        _log.info("limits: %.1f GB/s, %.0f GFLOP/s", limits.bytes_per_s / 1e9, limits.flops_per_s / 1e9)
        return limits

    # --- decode -------------------------------------------------------------------------------------------------------

    def _decode_cell(self, batch: int, context: int) -> DecodeCell:
        measured = quietest(partial(self._decode_steps, batch, context), self._workload.max_tries)
        cell = DecodeCell(
            batch=batch,
            context=context,
            step=Spread.of(measured.value.times_s),
            bytes_read=self._costs.decode_bytes(batch, context),
            shares=self._shares([measured.value], batch),
            foreign_cores=measured.foreign_cores,
            num_tries=measured.num_tries,
        )
        _log.info("decode %d×%d: %.1f ms a step", batch, context, 1e3 * cell.step.median_s)
        return cell

    def _decode_steps(self, batch: int, context: int) -> _Timed:
        """The middle one of the timed steps sees `context` tokens."""
        num_steps = self._workload.num_steps
        first = max(1, context - num_steps // 2 - WARM_UP_STEPS)
        sequences = self._maker.decode_batch(batch, first, WARM_UP_STEPS + num_steps)
        for _ in range(WARM_UP_STEPS):
            run_step(self._engine, sequences)
        return self._timed(lambda: run_step(self._engine, sequences), num_steps)

    # --- prefill ------------------------------------------------------------------------------------------------------

    def _prefill_cells(self, num_tokens: int) -> list[PrefillCell]:
        """Of one prompt length. The chunk sizes take turns, so that the machine's drift is the same for all."""
        prompts: dict[int, list[Measured[_Timed]]] = {chunk: [] for chunk in self._workload.chunks}
        for _ in range(self._workload.num_prefills):
            for chunk, measured in prompts.items():
                measured.append(quietest(partial(self._prefill, num_tokens, chunk), self._workload.max_tries))
        return [self._prefill_cell(num_tokens, chunk, measured) for chunk, measured in prompts.items()]

    def _prefill_cell(self, num_tokens: int, chunk: int, prompts: list[Measured[_Timed]]) -> PrefillCell:
        cell = PrefillCell(
            num_tokens=num_tokens,
            chunk=chunk,
            prompt=Spread.of([time_s for prompt in prompts for time_s in prompt.value.times_s]),
            flops=self._costs.prefill_flops(num_tokens),
            shares=self._shares([prompt.value for prompt in prompts], 1),
            foreign_cores=max(prompt.foreign_cores for prompt in prompts),
            num_tries=sum(prompt.num_tries for prompt in prompts),
        )
        _log.info("prefill %d in %d: %.0f tokens/s", num_tokens, chunk, cell.tokens_per_s)
        return cell

    def _prefill(self, num_tokens: int, chunk: int) -> _Timed:
        sequence = self._maker.prompt(num_tokens)
        return self._timed(lambda: run_prompt(self._engine, sequence, chunk), 1)

    # --- both ---------------------------------------------------------------------------------------------------------

    def _timed(self, call: Callable[[], object], num_calls: int) -> _Timed:
        before = self._engine.runner.profile()
        times_s = [_seconds(call) for _ in range(num_calls)]
        after = self._engine.runner.profile()
        return _Timed(times_s, _difference(before, after))

    def _shares(self, timed: list[_Timed], num_samples: int) -> Shares | None:
        """Of calls that sampled `num_samples` rows each."""
        profiles = [one.profile for one in timed if one.profile is not None]
        if not profiles:
            return None
        times_s = [time_s for one in timed for time_s in one.times_s]
        return Shares.of(
            sum(times_s),
            gemm_s=sum(profile.gemm_s for profile in profiles),
            attention_s=sum(profile.attention_s for profile in profiles),
            sampling_s=len(times_s) * self._sampling_s(num_samples),
            model_rest_s=sum(profile.other_s for profile in profiles),
        )

    def _sampling_s(self, num_rows: int) -> float:
        """Of greedy rows, measured by itself: the runner does not say."""
        logits = torch.randn(num_rows, self._engine.model_info.vocab_size).numpy()
        sequences: list[Sequence] = [self._maker.prompt(1) for _ in range(num_rows)]
        return median(_seconds(lambda: sample_rows(logits, sequences)) for _ in range(5))


def _seconds(call: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    call()
    return time.perf_counter() - begin_s


def _difference(before: Profile | None, after: Profile | None) -> Profile | None:
    if before is None or after is None:
        return None
    return Profile(after.gemm_s - before.gemm_s, after.attention_s - before.attention_s, after.other_s - before.other_s)
