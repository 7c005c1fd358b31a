"""What samples of a server's metrics say, whatever prefix, such as `pdserve:`, and labels the series have."""

from collections.abc import Sequence

from pdserve_bench.load.records import ServerSample


def values(samples: Sequence[ServerSample], stem: str) -> list[float]:
    """Of every series whose name is `stem` after its prefix, in every sample."""
    return [value for sample in samples for value in _of(sample, stem)]


def rise(samples: Sequence[ServerSample], stems: Sequence[str], beside: str) -> float | None:
    """Of counters together, from the first to the last sample that shows `beside`; None: there is none.

    A counter with labels is not shown before its first count: until then it is at 0.
    """
    sums = [sum(value for stem in stems for value in _of(sample, stem)) for sample in samples if _of(sample, beside)]
    return sums[-1] - sums[0] if sums else None


def _of(sample: ServerSample, stem: str) -> list[float]:
    return [value for name, value in sample.values.items() if name.partition("{")[0].rpartition(":")[2] == stem]
