"""How processes log: standard library logging to stderr, one line a record, with role and worker id."""

import logging
import sys
from datetime import UTC, datetime
from typing import TextIO


class LineFormatter(logging.Formatter):
    """`2026-11-30T08:42:01.123Z INFO decode/decode-0 pdserve.engine: message`; line breaks are escaped."""

    def __init__(self, role: str, worker_id: str = "") -> None:
        super().__init__()
        self._process = f"{role}/{worker_id}" if worker_id and worker_id != role else role

    def format(self, record: logging.LogRecord) -> str:
        instant = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        parts = [record.getMessage()]
        if record.exc_info:
            parts.append(self.formatException(record.exc_info))
        if record.stack_info:
            parts.append(record.stack_info)
        text = "\\n".join(part.replace("\r", "\\r").replace("\n", "\\n") for part in parts)
        return f"{instant.removesuffix('+00:00')}Z {record.levelname} {self._process} {record.name}: {text}"


def configure_logging(level: str, role: str, worker_id: str = "", stream: TextIO | None = None) -> None:
    """Make the root logger write lines to `stream` (stderr); a second call replaces the first's handler.

    Args:
        level: "debug", "info", "warning" or "error".
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(LineFormatter(role, worker_id))
    root = logging.getLogger()
    for previous in [item for item in root.handlers if isinstance(item.formatter, LineFormatter)]:
        root.removeHandler(previous)
    root.addHandler(handler)
    root.setLevel(level.upper())
    for chatty in ("httpx", "httpcore", "asyncio"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
