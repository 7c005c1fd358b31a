"""The Decode RPC service: protobuf on one side, DecodeRequests and the engine's events on the other."""

import time
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Seq
from typing import Any

import grpc.aio

from decode_service.entry import DecodeJob
from decode_service.requests import DecodeRequests, Prompt
from decode_service.stage import DecodeStage
from pdserve.client.errors import abort_with
from pdserve.client.wire import sampling_from_proto, sequence_id_from_proto
from pdserve.core.errors import PdserveError
from pdserve.core.model_info import ModelInfo
from pdserve.engine.events import (
    Event,
    SequenceFailed,
    SequenceReleased,
    SequenceTransferred,
    StageSnapshot,
    TokenSampled,
)
from pdserve.engine.ledger import Demand, Denied, ReservationLedger
from pdserve.engine.step_loop import EngineThread
from pdserve.serving.load import StageLoad, WorkerTotals
from pdserve.serving.messages import deadline_from, micros, prefix_group, token_output
from pdserve.serving.output_streams import OutputStreams
from pdserve.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from pdserve.worker.checks import check_sequence


class DecodeService(worker_pb2_grpc.DecodeServicer):
    """One per worker."""

    def __init__(
        self,
        incarnation: int,
        model: ModelInfo,
        ledger: ReservationLedger,
        engine: EngineThread,
        stage: DecodeStage,
        ledger_changed: Callable[[], None],
    ) -> None:
        self._model = model
        self._ledger = ledger
        self._stage = stage
        self._snapshot = StageSnapshot()
        self._outputs = OutputStreams(incarnation, lambda: engine.step_count, self._coordinator_left)
        self.requests = DecodeRequests(ledger, engine, stage, self._outputs.put_error, ledger_changed)

    # --- RPC ----------------------------------------------------------------------------------------------------------

    async def Reserve(
        self, request: worker_pb2.ReserveRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> worker_pb2.ReserveResponse:
        sequence_id = sequence_id_from_proto(request.context.request_id)
        demand = Demand(request.num_tokens_max, request.num_tokens_expected or request.num_tokens_max)
        prompt, deadline_s = Prompt(request.token_ids, prefix_group(request.context)), deadline_from(request.context)
        try:
            answer = self.requests.reserve(sequence_id, demand, time.monotonic(), deadline_s, prompt)
        except PdserveError as error:
            await abort_with(context, error)
        if isinstance(answer, Denied):
            denied = worker_pb2.ReserveResponse.Denied(
                needed=answer.needed,
                free=answer.free,
                ledger_version=answer.ledger_version,
                never_fits=answer.never_fits,
            )
            return worker_pb2.ReserveResponse(denied=denied)
        granted = worker_pb2.ReserveResponse.Granted(
            reservation_id=answer.reservation_id,
            num_blocks=answer.num_blocks,
            lease_ms=round(self._ledger.lease_s * 1000),
            num_cached_blocks=self.requests.num_cached_blocks(sequence_id),
        )
        return worker_pb2.ReserveResponse(granted=granted)

    async def Release(
        self, request: worker_pb2.ReleaseRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> worker_pb2.ReleaseResponse:
        self.requests.cancel(sequence_id_from_proto(request.request_id))
        return worker_pb2.ReleaseResponse()

    async def Run(
        self,
        request_iterator: AsyncIterator[worker_pb2.DecodeCommands],
        context: "grpc.aio.ServicerContext[Any, Any]",
    ) -> AsyncIterator[worker_pb2.WorkerOutputs]:
        async for message in self._outputs.run(request_iterator, self._handle):
            yield message

    def _handle(self, message: worker_pb2.DecodeCommands) -> None:
        # Any word from a coordinator shows that it is alive.
        self.requests.renew(message.coordinator_incarnation, time.monotonic())
        for command in message.commands:
            if command.HasField("submit"):
                self._submit(command.submit)
            elif command.HasField("cancel"):
                self.requests.cancel(sequence_id_from_proto(command.cancel.request_id))

    def _submit(self, submit: worker_pb2.DecodeSubmit) -> None:
        sequence_id, sampling = sequence_id_from_proto(submit.context.request_id), sampling_from_proto(submit.sampling)
        try:
            check_sequence(submit.token_ids, submit.num_prompt_tokens, submit.first_output_index, sampling, self._model)
        except PdserveError as error:
            self.requests.refuse(sequence_id, error)
            return
        job = DecodeJob(
            sequence_id=sequence_id,
            token_ids=tuple(submit.token_ids),
            num_prompt_tokens=submit.num_prompt_tokens,
            sampling=sampling,
            deadline_s=deadline_from(submit.context),
            num_blocks=0,
            group=prefix_group(submit.context),
        )
        self.requests.submit(job, submit.reservation_id)

    # --- from the engine ----------------------------------------------------------------------------------------------

    def handle_turn(self, events: Seq[Event], snapshot: StageSnapshot) -> None:
        """What one turn of the engine produced; on the event loop."""
        self._snapshot = snapshot
        for event in events:
            match event:
                case TokenSampled(sequence_id, index, token_id, logprobs, finish_reason, spent):
                    durations = common_pb2.PhaseDurations(
                        compute_us=micros(spent.compute_s), exposed_transfer_us=micros(spent.exposed_transfer_s)
                    )
                    self._outputs.put(sequence_id, token_output(index, token_id, logprobs, finish_reason, durations))
                case SequenceFailed(sequence_id, error):
                    self._outputs.put_error(sequence_id, error)
                case SequenceReleased(sequence_id):
                    self.requests.engine_released(sequence_id)
                case SequenceTransferred():
                    raise RuntimeError("a decode stage sends no KV")

    def load(self) -> StageLoad:
        """What this stage holds now; on the event loop."""
        now, totals = self._snapshot, self._stage.totals
        return StageLoad(
            num_waiting=now.num_waiting,
            num_running=now.num_running,
            num_transferring=self.requests.num_receiving,
            num_running_tokens=now.num_running_tokens,
            decode_tokens_per_s=totals.num_tokens / totals.compute_s if totals.compute_s > 0 else 0.0,
            totals=WorkerTotals(
                decode_tokens=totals.num_tokens,
                decodes_completed=totals.num_completed,
                cancelled=totals.num_cancelled,
                failed=totals.num_failed,
                stale_events=totals.num_stale + self.requests.num_stale,
                nan_rows=totals.num_nan_rows,
                exposed_transfer_s=totals.exposed_transfer_s,
                prefix_queries=totals.num_prefix_queries,
                prefix_hits=totals.num_prefix_hits,
            ),
        )

    @property
    def num_requests(self) -> int:
        return len(self.requests)

    def fail_all(self, error: PdserveError) -> None:
        """The worker stops before these are done."""
        self.requests.fail_all(error)

    def reap(self, now_s: float) -> None:
        """Cancel what no coordinator renews any more."""
        self.requests.reap(now_s)

    def close(self) -> None:
        """End the Run streams once what is pending has been sent."""
        self._outputs.close_all()

    def _coordinator_left(self, coordinator_incarnation: int) -> None:
        self.requests.cancel_coordinator(coordinator_incarnation)
