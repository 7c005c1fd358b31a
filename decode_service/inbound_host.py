"""What a KV receiver asks of the decode service, brought from the receiver's threads to the loop and the engine."""

import asyncio
import time
from collections.abc import Coroutine
from collections.abc import Sequence as Seq
from typing import Any, TypeVar

from decode_service.requests import DecodeRequests
from decode_service.stage import DecodeStage
from kv_transfer.interfaces import InboundCommit, InboundGrant
from pdserve.core.errors import PdserveError
from pdserve.core.ids import SequenceId
from pdserve.engine.block_pool import OwnerKind
from pdserve.engine.step_loop import EngineThread

T = TypeVar("T")


class DecodeInboundHost:
    """Implements kv_transfer.interfaces.InboundHost. `allocate` waits for the event loop, `commit` for up to one engine
    step, too; neither may be called on the event loop. `release` returns at once and may come from any thread."""

    def __init__(self, requests: DecodeRequests, engine: EngineThread, stage: DecodeStage) -> None:
        self._loop = asyncio.get_running_loop()
        self._requests = requests
        self._engine = engine
        self._stage = stage

    def allocate(self, sequence_id: SequenceId, reservation_id: int, num_blocks: int) -> InboundGrant:
        return self._wait(self._allocate(sequence_id, reservation_id, num_blocks))

    def commit(self, commit: InboundCommit) -> None:
        self._wait(self._commit(commit))

    def release(self, sequence_id: SequenceId, reservation_id: int, block_ids: Seq[int], error: PdserveError) -> None:
        def give_back() -> None:
            self._stage.release_inbound(sequence_id, block_ids)
            self._loop.call_soon_threadsafe(self._requests.inbound_ended, sequence_id)

        self._engine.post(give_back)

    async def _allocate(self, sequence_id: SequenceId, reservation_id: int, num_blocks: int) -> InboundGrant:
        self._requests.begin_inbound(sequence_id, reservation_id, num_blocks)
        try:
            block_ids = self._stage.allocate_inbound(sequence_id, num_blocks)
        except BaseException:
            self._requests.inbound_ended(sequence_id)
            raise
        return InboundGrant(block_ids)

    async def _commit(self, commit: InboundCommit) -> None:
        self._requests.check_live(commit.sequence_id, commit.reservation_id)
        await asyncio.wrap_future(
            self._engine.call(lambda: self._stage.adopt(commit, OwnerKind.INBOUND, time.monotonic()))
        )
        self._requests.inbound_ended(commit.sequence_id, adopted=True)

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
