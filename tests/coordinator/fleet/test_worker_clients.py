import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from coordinator.fleet.values import Denied, Granted, Role, WorkerInfo, WorkerKey, WorkerOutput
from coordinator.fleet.worker_clients import ConnectionConfig, WorkerClient
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.ids import SequenceId
from tests.support.scheduling_rig import WAIT_S, Rig, request, scheduling_rig
from tests.support.scripted_worker import ScriptedWorker
from tests.support.worker_views import BOTH, info

ID = SequenceId(1, 1)


@dataclass
class Events:
    outputs: list[tuple[Role, WorkerOutput]] = field(default_factory=list)
    lost: "asyncio.Future[PdserveError]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def on_outputs(self, role: Role, outputs: Sequence[WorkerOutput]) -> None:
        self.outputs.extend((role, output) for output in outputs)

    def on_lost(self, error: PdserveError) -> None:
        self.lost.set_result(error)


def described(worker: ScriptedWorker) -> WorkerInfo:
    return WorkerInfo(
        **{
            **{name: getattr(info("x", BOTH), name) for name in WorkerInfo.__slots__},
            "key": WorkerKey(worker.name, worker.incarnation),
            "control_address": f"127.0.0.1:{worker.port}",
        }
    )


async def connected(rig: Rig, events: Events) -> tuple[ScriptedWorker, WorkerClient]:
    """A second connection to a worker of the rig, as another coordinator would have."""
    worker = await rig.add("c0", "colocated", 8)
    client = WorkerClient(described(worker), ConnectionConfig(1, heartbeat_s=60.0), events)
    await client.start()
    await rig.until(lambda: worker.num_heartbeats >= 4)
    return worker, client


async def test_reserve_is_granted_or_denied() -> None:
    async with scheduling_rig() as rig:
        worker, client = await connected(rig, Events())
        granted = await client.reserve(ID, request((1, 2), 30), 5.0)
        assert isinstance(granted, Granted)
        assert granted.num_blocks == 8
        assert list(worker.reserves[0].token_ids) == [1, 2]
        denied = await client.reserve(SequenceId(1, 2), request((1, 2), 30), 5.0)
        assert isinstance(denied, Denied)
        assert (denied.needed, denied.free, denied.never_fits) == (8, 0, False)
        too_big = await client.reserve(SequenceId(1, 3), request((1, 2), 31), 5.0)
        assert isinstance(too_big, Denied)
        assert too_big.never_fits
        client.cancel(Role.DECODE, ID)
        await rig.until(lambda: not worker.reservations)
        client.close()
        await client.closed()


async def test_commands_queued_together_arrive_in_order() -> None:
    async with scheduling_rig() as rig:
        worker, client = await connected(rig, Events())
        worker.script.prefill.clear()
        for i in range(200):
            client.submit_prefill(SequenceId(1, i), request((1,) * 2000, 1), 5.0, None)
            client.cancel(Role.PREFILL, SequenceId(1, i))
        await rig.until(lambda: len(worker.cancels) == 200)
        assert worker.cancels == [SequenceId(1, i) for i in range(200)]
        assert [sequence_id for _, sequence_id in worker.submits] == worker.cancels
        client.close()
        await client.closed()


async def test_the_end_of_a_worker_is_told_once() -> None:
    async with scheduling_rig() as rig:
        events = Events()
        worker, client = await connected(rig, events)
        await worker.kill()
        error = await asyncio.wait_for(events.lost, WAIT_S)
        assert error.reason is ErrorReason.WORKER_LOST
        assert "c0" in error.message
        client.close()
        await client.closed()
        with pytest.raises(PdserveError):
            await client.reserve(ID, request(), 0.2)


async def test_closing_fails_what_was_asked() -> None:
    async with scheduling_rig() as rig:
        worker, client = await connected(rig, Events())
        worker.script.reserve.clear()
        asking = asyncio.create_task(client.reserve(ID, request(), 60.0))
        await rig.until(lambda: worker.num_asked == 1)
        client.close()
        with pytest.raises(PdserveError) as caught:
            await asking
        assert caught.value.reason is ErrorReason.WORKER_LOST


async def test_closing_is_not_a_loss() -> None:
    async with scheduling_rig() as rig:
        events = Events()
        _, client = await connected(rig, events)
        client.close()
        await client.closed()
        assert not events.lost.done()


async def test_a_dead_address_is_a_lost_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.fleet.worker_clients.DIAL_TIMEOUT_S", 0.1)
    client = WorkerClient(info("nobody", BOTH), ConnectionConfig(1, 1.0), Events())
    with pytest.raises(PdserveError) as caught:
        await client.start()
    assert caught.value.reason is ErrorReason.WORKER_LOST
