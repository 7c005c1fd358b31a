"""The Prefill RPC service: protobuf on one side, PrefillRequests and the engine's events on the other."""

import time
from collections.abc import AsyncIterator
from collections.abc import Sequence as Seq
from typing import Any

import grpc.aio

from kv_transfer.interfaces import KvSender, OutboundEnd, OutboundTransfer, Peer, TransferPlan
from pdserve.client.wire import kv_layout_from_proto, sampling_from_proto, sequence_id_from_proto
from pdserve.core.errors import PdserveError, invalid
from pdserve.core.model_info import ModelInfo
from pdserve.core.reservation import blocks_for_tokens
from pdserve.engine.events import (
    Event,
    SequenceFailed,
    SequenceReleased,
    SequenceTransferred,
    StageSnapshot,
    TokenSampled,
)
from pdserve.engine.ledger import ReservationLedger
from pdserve.engine.sequence import Sequence
from pdserve.engine.step_loop import EngineThread
from pdserve.serving.load import ByTransport, StageLoad, TransportTotals, WorkerTotals
from pdserve.serving.messages import deadline_from, micros, prefix_group, token_output
from pdserve.serving.output_streams import OutputStreams
from pdserve.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from pdserve.worker.checks import check_sequence
from prefill_service.prompt import PrefillJob
from prefill_service.requests import LocalDecode, PrefillRequest, PrefillRequests
from prefill_service.stage import PrefillStage

LOCAL = "local"


class PrefillService(worker_pb2_grpc.PrefillServicer):
    """One per worker. `sender` knows every transport that this worker has."""

    def __init__(  # noqa: PLR0917 - the parts it is put together from, each once
        self,
        incarnation: int,
        model: ModelInfo,
        ledger: ReservationLedger,
        engine: EngineThread,
        stage: PrefillStage,
        sender: KvSender,
        local_decode: LocalDecode | None = None,
    ) -> None:
        self._model = model
        self._block_size = ledger.block_size
        self._engine = engine
        self._stage = stage
        self._snapshot = StageSnapshot()
        self._sender = sender
        self._outputs = OutputStreams(incarnation, lambda: engine.step_count, self._coordinator_left)
        self.requests = PrefillRequests(ledger, engine, stage, self._outputs.put_error, local_decode)

    # --- RPC ----------------------------------------------------------------------------------------------------------

    async def Run(
        self,
        request_iterator: AsyncIterator[worker_pb2.PrefillCommands],
        context: "grpc.aio.ServicerContext[Any, Any]",
    ) -> AsyncIterator[worker_pb2.WorkerOutputs]:
        async for message in self._outputs.run(request_iterator, self._handle):
            yield message

    def _handle(self, message: worker_pb2.PrefillCommands) -> None:
        for command in message.commands:
            if command.HasField("submit"):
                self._submit(command.submit)
            elif command.HasField("cancel"):
                self.requests.cancel(sequence_id_from_proto(command.cancel.request_id))
            # A heartbeat has nothing to renew here: prompts end by their deadline or with their coordinator's stream.

    def _submit(self, submit: worker_pb2.PrefillSubmit) -> None:
        sequence_id = sequence_id_from_proto(submit.context.request_id)
        sampling = sampling_from_proto(submit.sampling)
        try:
            check_sequence(submit.token_ids, submit.num_prompt_tokens, submit.first_output_index, sampling, self._model)
            sequence = Sequence(sequence_id, list(submit.token_ids), submit.num_prompt_tokens, sampling)
            request = self._request(sequence, submit)
        except PdserveError as error:
            self._outputs.put_error(sequence_id, error)
        else:
            self.requests.submit(request)

    def _request(self, sequence: Sequence, submit: worker_pb2.PrefillSubmit) -> PrefillRequest:
        deadline_s, group = deadline_from(submit.context), prefix_group(submit.context)
        if not submit.HasField("target"):
            return PrefillRequest(PrefillJob(sequence, deadline_s, time.monotonic(), None, group=group))
        plan = self._plan(sequence, submit.target, deadline_s)
        local = plan.peer.transport == LOCAL
        job = PrefillJob(
            sequence, deadline_s, time.monotonic(), lambda: self._open(plan), local, plan.first_block, group
        )
        return PrefillRequest(job, plan.reservation_id if local else None)

    def _plan(self, sequence: Sequence, target: worker_pb2.DecodeTarget, deadline_s: float) -> TransferPlan:
        """Within one pool all blocks change hands; elsewhere those that the decode worker lacks are sent."""
        num_blocks = blocks_for_tokens(sequence.num_tokens, self._block_size)
        if target.num_cached_blocks > num_blocks:
            message = f"{target.num_cached_blocks} of the prompt's {num_blocks} blocks are said to be cached"
            raise invalid(message, "num_cached_blocks")
        first_block = 0 if target.transport == LOCAL else target.num_cached_blocks
        peer = Peer(
            target.worker.worker_id,
            target.worker.incarnation,
            target.kv_address,
            kv_layout_from_proto(target.kv_layout),
            target.transport,
        )
        return TransferPlan(
            sequence_id=sequence.id,
            peer=peer,
            reservation_id=target.reservation_id,
            num_tokens=sequence.num_tokens,
            num_blocks=num_blocks - first_block,
            first_block=first_block,
            deadline_remaining_s=deadline_s - time.monotonic(),
        )

    def _open(self, plan: TransferPlan) -> OutboundTransfer:
        def on_end(end: OutboundEnd) -> None:
            self._engine.post(lambda: self._stage.transfer_ended(end))

        return self._sender.open(plan, on_end)

    # --- from the engine ----------------------------------------------------------------------------------------------

    def handle_turn(self, events: Seq[Event], snapshot: StageSnapshot) -> None:
        """What one turn of the engine produced; on the event loop."""
        self._snapshot = snapshot
        for event in events:
            match event:
                case TokenSampled(sequence_id, index, token_id, logprobs, finish_reason, spent, of_prompt, cached):
                    durations = common_pb2.PhaseDurations(
                        queue_us=micros(spent.queue_s), compute_us=micros(spent.compute_s)
                    )
                    output = token_output(
                        index, token_id, logprobs, finish_reason, durations, of_prompt, num_cached_tokens=cached
                    )
                    self._outputs.put(sequence_id, output)
                case SequenceFailed(sequence_id, error):
                    self._outputs.put_error(sequence_id, error)
                case SequenceTransferred(sequence_id, spent):
                    durations = common_pb2.PhaseDurations(
                        transfer_us=micros(spent.transfer_s), transfer_bytes=spent.transfer_bytes
                    )
                    self._outputs.put(sequence_id, worker_pb2.SequenceOutput(transferred=True, durations=durations))
                case SequenceReleased():
                    self.requests.released(event)

    def load(self) -> StageLoad:
        """What this stage holds now; on the event loop."""
        now, totals = self._snapshot, self._stage.totals
        transfers = dict(totals.transfers)
        sent = sum(transfers.values(), TransportTotals())
        return StageLoad(
            queued_prefill_tokens=now.num_queued_tokens + self.requests.num_waiting_tokens,
            num_waiting=now.num_waiting + self.requests.num_waiting,
            num_running=now.num_running,
            num_transferring=now.num_transferring,
            prefill_tokens_per_s=totals.num_tokens / totals.compute_s if totals.compute_s > 0 else 0.0,
            totals=WorkerTotals(
                prefill_tokens=totals.num_tokens,
                prefills_completed=totals.num_completed,
                transfers_completed=sent.num_completed,
                transfers_failed=sent.num_failed,
                transferred_bytes=sent.num_bytes,
                cancelled=totals.num_cancelled,
                failed=totals.num_failed,
                stale_events=totals.num_stale,
                nan_rows=totals.num_nan_rows,
                prefix_queries=totals.num_prefix_queries,
                prefix_hits=totals.num_prefix_hits,
                transports=ByTransport(transfers),
            ),
        )

    @property
    def num_requests(self) -> int:
        return len(self.requests)

    def fail_all(self, error: PdserveError) -> None:
        """The worker stops before these are done."""
        self.requests.fail_all(error)

    def reap(self, now_s: float) -> None:
        """End what waited for room beyond its deadline; nothing here lives on a lease."""
        self.requests.reap(now_s)

    def close(self) -> None:
        """End the Run streams once what is pending has been sent."""
        self._outputs.close_all()

    def _coordinator_left(self, coordinator_incarnation: int) -> None:
        self.requests.cancel_coordinator(coordinator_incarnation)
