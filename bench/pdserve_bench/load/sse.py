"""Server-sent events out of a byte stream that may be cut anywhere. Gives each event's data; decodes none of it."""


class EventParser:
    """One stream. As the HTML standard has it: lines end with LF, CRLF or CR, an event with an empty line.

    An event that its stream does not end is never given. Names, ids and comments are passed over.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._after_cr = False

    def feed(self, part: bytes) -> list[bytes]:
        """The data of each event that `part` completes, in order."""
        if self._after_cr or b"\r" in part:
            part = self._with_lf_only(part)
        *blocks, self._rest = (self._rest + part).split(b"\n\n")
        return [data for block in blocks if (data := _data(block)) is not None]

    def _with_lf_only(self, part: bytes) -> bytes:
        if self._after_cr and part:
            part = part.removeprefix(b"\n")
            self._after_cr = False
        self._after_cr = self._after_cr or part.endswith(b"\r")
        return part.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def _data(block: bytes) -> bytes | None:
    """Of one event's lines; None where it has no data."""
    if block.startswith(b"data: ") and b"\n" not in block:
        return block[6:]
    lines = [line for line in block.split(b"\n") if line == b"data" or line.startswith(b"data:")]
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines) if lines else None
