"""Which implementation of a decoder is used where: compiled for this CPU where that can run, else torch."""

import importlib
import logging
import time
from dataclasses import dataclass
from typing import Literal

import torch

from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.model_files import ModelConfig
from pdserve.engine.model.decoder import DecoderModel
from pdserve.engine.model.interface import Model
from pdserve_kernels.host import why_not_here
from pdserve_kernels.torch_reference import TorchKernels

KernelChoice = Literal["auto", "native", "torch"]
Precision = Literal["float32", "bfloat16"]

_LOG = logging.getLogger(__name__)
_LAST_COMPILED = "decoder.sample_logits-*.nbc"
"""Where this file is, all kernels are compiled."""


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How a model is computed; the limits bound one step's rows and the rows of logits asked for at once.

    `kernels`: "native" (compiled for this CPU), "torch", or "auto", native wherever it can run. `attention_precision`
    "bfloat16" rounds queries and attention weights where the processor has bf16 dot products: faster, less exact.
    """

    dtype: torch.dtype
    device: torch.device
    block_size: int
    max_rows: int
    max_samples: int
    kernels: KernelChoice = "auto"
    attention_precision: Precision = "float32"


def prepare_kernels(config: ModelConfig, options: ModelOptions) -> None:
    """Import the kernels that `empty_model` will use; if they must be compiled first, say so before and after."""
    if options.kernels == "torch" or _why_not_native(config, options):
        return
    from pdserve_kernels.cpu.compiled import cache_folder

    folder, begin_s = cache_folder(), time.monotonic()
    is_compiled = any(folder.glob(f"*/{_LAST_COMPILED}"))
    if not is_compiled:
        _LOG.info("compiling kernels for this processor: about half a minute, once if %s can be written", folder)
    importlib.import_module("pdserve_kernels.cpu.program")
    if not is_compiled:
        _LOG.info("kernels compiled in %.0f s", time.monotonic() - begin_s)


def empty_model(config: ModelConfig, options: ModelOptions) -> Model:
    """A model still to be loaded. Native ones use as many threads as torch is set to.

    Raises:
        PdserveError: UNSUPPORTED, native kernels are asked for and cannot run; the message says why.
    """
    refusal = "they were asked for" if options.kernels == "torch" else _why_not_native(config, options)
    if not refusal:
        # numba takes a while to import: only where it is used.
        from pdserve.engine.model.native_decoder import NativeDecoderModel, NativeLimits
        from pdserve_kernels.cpu.team import make_team

        limits = NativeLimits(options.max_rows, options.max_samples)
        rounded = options.attention_precision == "bfloat16"
        if rounded and (config.head_dim % 16 or options.block_size % 16):
            _LOG.warning("attention_precision bfloat16 needs a head dimension and blocks that are multiples of 16")
            rounded = False
        return NativeDecoderModel(
            config, options.dtype, limits, make_team(torch.get_num_threads()), bf16_attention=rounded
        )
    if options.kernels == "native":
        raise PdserveError(ErrorReason.UNSUPPORTED, f"native kernels cannot run: {refusal}", param="kernels")
    _LOG.info("computing with torch: %s", refusal)
    return DecoderModel(config, options.dtype, options.device, TorchKernels())


def _why_not_native(config: ModelConfig, options: ModelOptions) -> str:
    """Empty if they can run."""
    if options.device.type != "cpu":
        return f"the device is {options.device}"
    if options.dtype not in (torch.float32, torch.bfloat16):
        return f"the dtype is {options.dtype}"
    sizes = (config.hidden_size, config.intermediate_size, options.block_size)
    if options.dtype == torch.bfloat16 and any(size % 2 for size in sizes):
        return "hidden size, intermediate size and block size must be even in bfloat16"
    return why_not_here()
