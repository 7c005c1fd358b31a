"""What the flags of `vllm bench serve` say about its figures. Parses them, and computes none."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

METRICS = ("ttft", "tpot", "itl", "e2el")


@dataclass(frozen=True, slots=True)
class VllmSlo:
    """Bounds of `--goodput`, in milliseconds; None: not asked for."""

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """As the flags of the same names. `goodput` None: no `request_goodput`. `detailed`: with a list entry a request."""

    backend: str = "openai"
    percentile_metrics: tuple[str, ...] = METRICS
    metric_percentiles: tuple[float, ...] = (50.0, 99.0)
    goodput: VllmSlo | None = None
    detailed: bool = True


DEFAULT_OPTIONS = VllmOptions()


def parse_goodput(pairs: Sequence[str]) -> VllmSlo:
    """From "ttft:6000", "tpot:100", "e2el:…", in milliseconds.

    Raises:
        ValueError: a pair is of another form, names another metric or one twice, or its bound is negative or no number.
    """
    bounds: dict[str, float] = {}
    names = [field.name for field in fields(VllmSlo)]
    for pair in pairs:
        name, colon, bound = pair.partition(":")
        if not colon or name not in names:
            raise ValueError(f"goodput objective {pair!r}: not METRIC:MILLISECONDS with one of {', '.join(names)}")
        if name in bounds:
            raise ValueError(f"goodput objective {pair!r}: {name} is given twice")
        bounds[name] = _number(bound, f"goodput objective {pair!r}", at_most=math.inf)
    return VllmSlo(**bounds)


def parse_percentile_metrics(names: str) -> tuple[str, ...]:
    """From "ttft,tpot,itl,e2el".

    Raises:
        ValueError: one is not among these.
    """
    metrics = tuple(name.strip() for name in names.split(","))
    for metric in metrics:
        if metric not in METRICS:
            raise ValueError(f"percentile metric {metric!r}: not one of {', '.join(METRICS)}")
    return metrics


def parse_metric_percentiles(percentiles: str) -> tuple[float, ...]:
    """From "50,99".

    Raises:
        ValueError: one is no number from 0 to 100.
    """
    return tuple(_number(text, f"percentile {text.strip()!r}", at_most=100.0) for text in percentiles.split(","))


def _number(text: str, what: str, *, at_most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{what}: {text.strip()!r} is no number") from None
    if not math.isfinite(value) or not 0.0 <= value <= at_most:
        raise ValueError(
            f"{what}: not within 0 and {at_most:g}" if at_most < math.inf else f"{what}: negative or not finite"
        )
    return value
