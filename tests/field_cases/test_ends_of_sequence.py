"""FIELD_CASES L05 with real processes: every id that any of the model's files calls an end is one, in both stages."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from pdserve.core.sampling import FinishReason
from tests.support.fleet import COLOCATED, DISAGGREGATED, run_fleet
from tests.support.tiny_models import write_tiny_llama

IN_GENERATION_CONFIG, IN_TOKENIZER = (40, 41), 2
ENDS = (*IN_GENERATION_CONFIG, IN_TOKENIZER)
MIN_TOKENS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_tiny_llama(tmp_path_factory.mktemp("ends") / "tiny")
    config = json.loads((directory / "config.json").read_text())
    del config["eos_token_id"]
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": list(IN_GENERATION_CONFIG)}))
    return directory


@pytest.mark.parametrize("roles", [DISAGGREGATED, COLOCATED], ids=["disaggregated", "colocated"])
async def test_each_id_ends_an_answer_unless_told_otherwise(model: Path, roles: Sequence[str]) -> None:
    async with run_fleet(model, roles) as fleet:
        for end in ENDS:
            forced = {"logit_bias": {end: 100.0}, "temperature": 0.0}
            first = await fleet.generate([5, 6, 7], max_tokens=9, **forced)
            assert (first.token_ids, first.text) == ((end,), "")
            assert first.finished.finish_reason is FinishReason.STOP
            ignored = await fleet.generate([5, 6, 7], max_tokens=9, ignore_eos=True, **forced)
            assert ignored.token_ids == (end,) * 9
            assert ignored.finished.finish_reason is FinishReason.LENGTH
        biases = {"logit_bias": dict.fromkeys(ENDS, 100.0), "temperature": 0.0}
        late = await fleet.generate([5, 6, 7], max_tokens=9, min_tokens=MIN_TOKENS, **biases)
        assert len(late.token_ids) == MIN_TOKENS + 1
        assert set(late.token_ids[:MIN_TOKENS]).isdisjoint(ENDS)
        assert late.finished.finish_reason is FinishReason.STOP
        await fleet.until_idle()
