"""Log lines."""

import io
import logging
from collections.abc import Iterator

import pytest

from pdserve.serving.logs import LineFormatter, configure_logging


@pytest.fixture(autouse=True)
def _restored_root() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_one_line_a_record_with_role_and_worker() -> None:
    stream = io.StringIO()
    configure_logging("info", "decode", "decode-0", stream)
    log = logging.getLogger("pdserve.engine")
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        log.exception("step failed:\n%s", "detail")
    log.debug("too fine")
    (line,) = stream.getvalue().splitlines()
    assert " ERROR decode/decode-0 pdserve.engine: step failed:\\ndetail\\nTraceback" in line
    assert "first\\nsecond" in line


def test_a_second_configuration_replaces_the_first() -> None:
    first, second = io.StringIO(), io.StringIO()
    configure_logging("info", "coordinator", "", first)
    configure_logging("error", "coordinator", "", second)
    logging.getLogger("x").error("once")
    logging.getLogger("x").info("filtered")
    assert first.getvalue() == ""
    assert second.getvalue().count("once") == len(second.getvalue().splitlines()) == 1


def test_the_instant_is_utc() -> None:
    record = logging.LogRecord("n", logging.INFO, __file__, 1, "m", None, None)
    record.created = 0.0
    assert LineFormatter("launcher").format(record) == "1970-01-01T00:00:00.000Z INFO launcher n: m"
