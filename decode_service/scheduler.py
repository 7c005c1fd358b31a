"""Which sequences decode in the next step: continuous batching, first come first served, up to a batch size.

Policy only. Reservations guarantee that whoever is here fits, so nobody is ever preempted.
"""

from collections import OrderedDict

from pdserve.core.ids import SequenceId


class DecodeScheduler:
    """Sequences join as soon as there is a row for them and leave at any step."""

    def __init__(self, max_batch_size: int) -> None:
        self._max_batch_size = max_batch_size
        self._running: OrderedDict[SequenceId, None] = OrderedDict()
        self._waiting: OrderedDict[SequenceId, None] = OrderedDict()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, sequence_id: SequenceId) -> None:
        self._waiting[sequence_id] = None

    def remove(self, sequence_id: SequenceId) -> bool:
        """Forget a sequence; False if it was not here."""
        for sequences in (self._running, self._waiting):
            if sequence_id in sequences:
                del sequences[sequence_id]
                return True
        return False

    def schedule(self) -> tuple[list[SequenceId], list[SequenceId]]:
        """(the whole batch of the next step, those of it that have just joined)."""
        joined: list[SequenceId] = []
        while self._waiting and len(self._running) < self._max_batch_size:
            sequence_id, _ = self._waiting.popitem(last=False)
            self._running[sequence_id] = None
            joined.append(sequence_id)
        return list(self._running), joined
