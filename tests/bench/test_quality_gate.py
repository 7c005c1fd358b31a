"""The gate on the real model and the fixed texts, as docs/quality.md shows it; and that it can fail."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from pdserve.engine import weights
from pdserve_bench.quality.__main__ import CONFIGURATIONS, REFERENCE
from pdserve_bench.quality.engine_scores import Configuration, score_engine
from pdserve_bench.quality.gate import gate
from pdserve_bench.quality.page import quality_tables
from pdserve_bench.quality.scores import Measurement, overall
from pdserve_bench.quality.texts import encode_slices
from pdserve_bench.quality.transformers_scores import score_transformers
from tests.support.mantissa import rounded

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def slices(smollm2: Path) -> Mapping[str, list[int]]:
    return encode_slices(smollm2)


@pytest.fixture(scope="module")
def reference(smollm2, slices) -> Measurement:
    return score_engine(smollm2, REFERENCE, slices)


@pytest.fixture(scope="module")
def rival(smollm2, slices) -> Measurement:
    return score_transformers(smollm2, "bfloat16", slices)


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=lambda configuration: configuration.label)
def test_the_gate_holds(smollm2, slices, reference, rival, configuration: Configuration):
    measured = score_engine(smollm2, configuration, slices)
    missed = [target for target in gate(measured, reference, rival) if not target.met]
    assert not missed, quality_tables(reference, [measured, rival])


def test_transformers_agrees_on_what_fp32_says(smollm2, slices, reference):
    """Else every row would be compared with the wrong thing."""
    found = overall(score_transformers(smollm2, "float32", slices), reference)
    assert found.perplexity_ratio == pytest.approx(1.0, abs=1e-4)
    assert found.agreement >= 0.999


def test_damaged_weights_fail_every_target(smollm2, slices, reference, rival, monkeypatch):
    """Four significant bits where bf16 has eight, on one slice."""
    decode = weights._decode
    monkeypatch.setattr(weights, "_decode", lambda rows, tensor: rounded(decode(rows, tensor), 4))
    damaged = score_engine(smollm2, CONFIGURATIONS[0], {"prose": slices["prose"]})
    targets = gate(damaged, _only_prose(reference), _only_prose(rival))
    assert not any(target.met for target in targets)


def _only_prose(measured: Measurement) -> Measurement:
    return Measurement(measured.label, "", tuple(score for score in measured.slices if score.name == "prose"))
