"""Which epoch of which run of each sender is the current one. No locks, no transfers."""

from collections import deque

from kv_transfer.messages import PairKey, WorkerIdentity, stale_pair

MAX_RETIRED = 1024


class PairTable:
    """Remembers the latest (incarnation, epoch) of every sending worker, and the incarnations that were replaced."""

    def __init__(self) -> None:
        self._epochs: dict[int, int] = {}
        self._incarnations: dict[str, int] = {}
        self._retired: deque[int] = deque(maxlen=MAX_RETIRED)

    def open(self, sender: WorkerIdentity, epoch: int) -> None:
        """Make `epoch` the current one; a new incarnation of the worker retires its earlier one for ever.

        Raises:
            PdserveError: STALE: a replaced incarnation, or an epoch not above the last.
        """
        if sender.incarnation in self._retired:
            raise stale_pair(f"incarnation {sender.incarnation:016x} of {sender.worker_id} was replaced")
        if epoch <= self._epochs.get(sender.incarnation, 0):
            raise stale_pair(f"epoch {epoch} is not above {self._epochs[sender.incarnation]}")
        earlier = self._incarnations.get(sender.worker_id)
        if earlier is not None and earlier != sender.incarnation:
            self._epochs.pop(earlier, None)
            self._retired.append(earlier)
        self._incarnations[sender.worker_id] = sender.incarnation
        self._epochs[sender.incarnation] = epoch

    def is_current(self, pair: PairKey) -> bool:
        return self._epochs.get(pair.incarnation) == pair.epoch

    def check(self, pair: PairKey) -> None:
        """Raises:
        PdserveError: STALE: not the current epoch of a known incarnation.
        """
        if not self.is_current(pair):
            raise stale_pair(f"epoch {pair.epoch} of incarnation {pair.incarnation:016x} is not current")
