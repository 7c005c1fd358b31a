"""The load generator against a server that answers at once."""

import pytest

from pdserve_bench.load import ceiling
from pdserve_bench.load.ceiling import own_ceiling


def test_every_token_of_every_request_arrives() -> None:
    found = own_ceiling(num_requests=20, prompt_tokens=16, output_tokens=8, concurrency=5)
    assert found.tokens_per_s == pytest.approx(8 * found.requests_per_s)
    assert found.requests_per_s > 0


def test_a_server_that_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceiling.sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="ended with exit code 1"):
        own_ceiling(num_requests=1)
