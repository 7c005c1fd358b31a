"""What a configuration must keep of fp32's quality to be served by default."""

from pdserve_bench.quality.scores import Measurement, overall
from pdserve_bench.targets import Target

MAX_PERPLEXITY_RATIO = 1.005
MIN_AGREEMENT = 0.975


def gate(measured: Measurement, reference: Measurement, rival: Measurement) -> tuple[Target, ...]:
    """Over all tokens; `reference` is fp32, `rival` what transformers makes of the same texts in bf16."""
    ours, least = overall(measured, reference), overall(rival, reference).agreement
    ratio, agreement = ours.perplexity_ratio, ours.agreement
    label = measured.label
    return (
        Target(f"{label}: perplexity over fp32's", "ratio", "<=", ratio, MAX_PERPLEXITY_RATIO, noise=0.0),
        Target(f"{label}: greedy agreement with fp32", "share", ">=", agreement, MIN_AGREEMENT, noise=0.0),
        Target(f"{label}: the same beside {rival.label}", "share", ">=", agreement, least, noise=0.0),
    )
