"""What a worker's log says of its memory."""

import logging
from pathlib import Path

import pytest

from pdserve.serving.settings import Settings
from pdserve.worker.loading import load


@pytest.mark.parametrize(("num_blocks", "warned"), [(2, True), (1024, False)])
def test_a_pool_too_small_for_the_context_is_a_warning(
    tiny_model: Path, caplog: pytest.LogCaptureFixture, num_blocks: int, warned: bool
) -> None:
    caplog.set_level(logging.INFO)
    model = {"source": str(tiny_model), "dtype": "float32"}
    load(Settings.model_validate({"model": model, "worker": {"num_blocks": num_blocks}}), ("decode",))
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert any("KV memory holds 32 tokens" in message for message in warnings) is warned
    assert f"{num_blocks} KV blocks of 16 tokens" in caplog.text
