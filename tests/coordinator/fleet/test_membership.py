import asyncio
from dataclasses import replace

import grpc
import pytest

from coordinator.fleet.membership import Fleet, FleetConfig
from coordinator.fleet.values import Role, WorkerState
from coordinator.sequences import SequencePhase
from pdserve.client.channels import aio_channel
from pdserve.client.errors import error_from_rpc
from pdserve.client.wire import PROTOCOL_VERSION, kv_layout_to_proto, model_info_to_proto
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.v1 import fleet_pb2, fleet_pb2_grpc
from tests.support.scheduling_rig import Rig, read_all, scheduling_rig
from tests.support.scripted_worker import LAYOUT, MODEL, expected_tokens


async def register(rig: Rig, **changes: object) -> PdserveError | None:
    """Register a worker like those of the rig but for `changes`; the refusal, or None."""
    fields: dict[str, object] = {
        "protocol_version": PROTOCOL_VERSION,
        "worker": fleet_pb2.WorkerId(worker_id="new", incarnation=7),
        "roles": [fleet_pb2.ROLE_DECODE],
        "model_name": MODEL.name,
        "model": model_info_to_proto(MODEL),
        "kv_layouts": [kv_layout_to_proto(LAYOUT)],
        "transports": ["grpc"],
        "control_address": "127.0.0.1:9",
        "kv_address": "127.0.0.1:9",
        "capacity": fleet_pb2.Capacity(num_blocks=10, block_size=4),
    }
    async with aio_channel(rig.address) as channel:
        stub: fleet_pb2_grpc.FleetAsyncStub = fleet_pb2_grpc.FleetStub(channel)
        try:
            await stub.Register(fleet_pb2.RegisterRequest(**{**fields, **changes}))  # type: ignore[arg-type]
        except grpc.RpcError as error:
            return error_from_rpc(error)
    return None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"protocol_version": PROTOCOL_VERSION + 2}, "protocol_version"),
        ({"model_name": "another"}, "another"),
        ({"model": model_info_to_proto(replace(MODEL, fingerprint="other"))}, "fingerprint"),
        ({"model": model_info_to_proto(replace(MODEL, dtype="bfloat16"))}, "dtype"),
        ({"model": model_info_to_proto(replace(MODEL, vocab_size=299))}, "vocab_size"),
        ({"model": model_info_to_proto(replace(MODEL, eos_token_ids=(1, 2)))}, "eos_token_ids"),
        ({"kv_layouts": [kv_layout_to_proto(LAYOUT)], "roles": []}, "roles"),
        ({"kv_layouts": []}, "kv_layouts"),
        ({"kv_address": ""}, "kv_address"),
        ({"worker": fleet_pb2.WorkerId(worker_id="new")}, "incarnation"),
        ({"capacity": fleet_pb2.Capacity(block_size=4)}, "num_blocks"),
    ],
)
async def test_incompatible_workers_are_refused_by_name(changes: dict[str, object], named: str) -> None:
    async with scheduling_rig() as rig:
        await rig.add("p0", "prefill")
        refusal = await register(rig, **changes)
        assert refusal is not None
        assert refusal.reason is ErrorReason.INCOMPATIBLE_PEER
        assert named in refusal.message
        assert [worker.info.key.worker_id for worker in rig.fleet.workers()] == ["p0"]


@pytest.mark.parametrize(
    ("field", "value"), [("dtype", "bfloat16"), ("block_size", 8), ("num_layers", 9), ("inner_order", "dim_slot")]
)
async def test_another_kv_layout_is_refused_naming_the_field(field: str, value: object) -> None:
    async with scheduling_rig() as rig:
        await rig.add("p0", "prefill")
        layout = kv_layout_to_proto(LAYOUT)
        setattr(layout, field, value)
        refusal = await register(rig, kv_layouts=[layout])
        assert refusal is not None
        assert field in refusal.message


async def test_with_two_models_a_worker_must_be_of_one_and_match_that_one() -> None:
    """Another model's workers may have another KV layout."""
    other = replace(MODEL, name="other", fingerprint="fp-2")
    async with scheduling_rig((MODEL, other)) as rig:
        await rig.add("p0", "prefill")
        refusals = [
            await register(rig, model_name="third"),
            await register(rig, model_name=other.name),  # with the first one's files
        ]
        for refusal, named in zip(refusals, ("'third' is not served here (served: other, tiny)", "fp-2"), strict=True):
            assert refusal is not None
            assert refusal.reason is ErrorReason.INCOMPATIBLE_PEER
            assert named in refusal.message
        layout = kv_layout_to_proto(replace(LAYOUT, num_layers=9))
        assert await register(rig, model_name=other.name, model=model_info_to_proto(other), kv_layouts=[layout]) is None
        assert await register(rig, kv_layouts=[layout]) is not None


async def test_a_neighbouring_protocol_version_is_welcome() -> None:
    async with scheduling_rig() as rig:
        assert await register(rig, protocol_version=PROTOCOL_VERSION + 1) is None


async def test_another_evaluation_id_is_welcome_but_told(caplog: pytest.LogCaptureFixture) -> None:
    async with scheduling_rig() as rig:
        await rig.add("p0", "prefill")
        assert await register(rig) is None
        assert "evaluation" not in caplog.text
        assert await register(rig, model=model_info_to_proto(replace(MODEL, evaluation_id="bf16/cpu-2/ab"))) is None
        assert "evaluation ids bf16/cpu-2/ab, unknown" in caplog.text
        async with aio_channel(rig.address) as channel:
            stub: fleet_pb2_grpc.FleetAsyncStub = fleet_pb2_grpc.FleetStub(channel)
            status = await stub.GetStatus(fleet_pb2.GetStatusRequest())
        told = {worker.worker.worker_id: worker.evaluation_id for pool in status.pools for worker in pool.workers}
        assert told == {"p0": "", "new": "bf16/cpu-2/ab"}


async def test_a_worker_that_cannot_be_dialled_is_forgotten() -> None:
    async with scheduling_rig() as rig:
        assert await register(rig) is None
        assert [rig.fleet.state(worker) for worker in rig.fleet.workers()] == [WorkerState.CONNECTING]
        worker = rig.fleet.workers()[0]
        rig.fleet.depart(worker)
        assert rig.fleet.workers() == []
        assert rig.fleet.state(worker) is WorkerState.LOST


async def test_a_new_incarnation_replaces_the_old_and_old_messages_are_ignored() -> None:
    async with scheduling_rig() as rig:
        old = await rig.add("p0", "prefill")
        await rig.add("d0", "decode")
        old.script.prefill.clear()
        stream = rig.submit((5, 6), 4)
        await rig.until(lambda: bool(old.prefilling))
        new = await rig.add("p0", "prefill")
        assert (await read_all(stream))[0] == expected_tokens((5, 6), 4)
        assert new.submits
        assert [w.info.key.incarnation for w in rig.fleet.workers() if w.info.key.worker_id == "p0"] == [
            new.incarnation
        ]
        old.report()
        await asyncio.wait([old._report_task])  # type: ignore[list-item]  # told STALE
        assert rig.state(new) is WorkerState.READY
        rig.workers["old"] = old


async def test_outputs_under_a_foreign_incarnation_are_ignored() -> None:
    async with scheduling_rig() as rig:
        prefill = await rig.add("p0", "prefill")
        await rig.add("d0", "decode")
        prefill.script.prefill.clear()
        stream = rig.submit((5, 6), 4)
        await rig.until(lambda: bool(prefill.prefilling))
        real, prefill.incarnation = prefill.incarnation, 12345
        prefill.fail(fleet_pb2.ROLE_PREFILL, prefill.submits[0][1], PdserveError(ErrorReason.INTERNAL, "stale"))
        await rig.until(lambda: prefill.num_sent > 0)
        prefill.incarnation = real
        prefill.script.prefill.set()
        assert (await read_all(stream))[0] == expected_tokens((5, 6), 4)


async def test_reports_of_an_unregistered_worker_are_stale() -> None:
    async with scheduling_rig() as rig, aio_channel(rig.address) as channel:
        stub: fleet_pb2_grpc.FleetAsyncStub = fleet_pb2_grpc.FleetStub(channel)
        unknown = fleet_pb2.WorkerId(worker_id="who", incarnation=1)
        call = stub.ReportLoad()
        await call.write(fleet_pb2.LoadReport(worker=unknown))
        with pytest.raises(grpc.RpcError) as caught:
            await call
        assert error_from_rpc(caught.value).reason is ErrorReason.STALE
        with pytest.raises(grpc.RpcError) as caught:
            await stub.Drain(fleet_pb2.DrainRequest(worker=unknown))
        assert error_from_rpc(caught.value).reason is ErrorReason.STALE


async def test_both_roles_streams_carry_heartbeats() -> None:
    async with scheduling_rig(heartbeat_s=0.05) as rig:
        prefill, decode = await rig.add("p0", "prefill"), await rig.add("d0", "decode")
        for worker in (prefill, decode):
            await rig.until(lambda worker=worker: worker.num_heartbeats >= 3)


async def test_status_tells_everything() -> None:
    async with scheduling_rig(max_queued_requests=7) as rig, aio_channel(rig.address) as channel:
        _, decode = await rig.add("p0", "prefill"), await rig.add("d0", "decode", 4)
        await rig.add("c0", "colocated", 3)
        decode.script.decode.clear()
        running, queued = rig.submit((5, 6), 14), rig.submit((6, 7), 14)
        await rig.until(lambda: decode.num_reserved == 4)
        rest = {("p0", Role.PREFILL): 0, ("c0", Role.PREFILL): 0, ("c0", Role.DECODE): 0}
        await rig.until(lambda: rig.in_flight() == {**rest, ("d0", Role.DECODE): 1})
        await rig.until(lambda: rig.dispatcher.num_in_phase(MODEL.name, SequencePhase.RESERVING) == 1)
        decode.report()
        stub: fleet_pb2_grpc.FleetAsyncStub = fleet_pb2_grpc.FleetStub(channel)
        status = await stub.GetStatus(fleet_pb2.GetStatusRequest())
        while any(w.num_in_flight > 1 for pool in status.pools for w in pool.workers):  # an answer is under way
            status = await stub.GetStatus(fleet_pb2.GetStatusRequest())
        pools = {pool.role: {w.worker.worker_id: w for w in pool.workers} for pool in status.pools}
        assert set(pools[fleet_pb2.ROLE_PREFILL]) == {"p0", "c0"}
        assert set(pools[fleet_pb2.ROLE_DECODE]) == {"d0", "c0"}
        d0 = pools[fleet_pb2.ROLE_DECODE]["d0"]
        assert (d0.state, d0.num_in_flight, d0.load.num_usable_blocks) == ("ready", 1, 4)
        assert [(q.num_requests, q.max_requests) for q in status.queues] == [(1, 7)]
        assert status.num_in_flight == 2
        assert not status.draining
        decode.script.decode.set()
        await asyncio.gather(read_all(running), read_all(queued))


class _Dial:
    """A connection that opens when the test says so."""

    def __init__(self) -> None:
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_closed = False

    async def start(self) -> None:
        await self.opened

    def close(self) -> None:
        self.is_closed = True

    async def closed(self) -> None:
        assert self.is_closed


async def test_a_connection_that_opens_as_its_worker_is_removed_is_closed() -> None:
    async with scheduling_rig() as rig:
        decode = await rig.add("d0", "decode")
        info = rig.fleet.workers()[0].info
        await decode.kill()
        dials: list[_Dial] = []

        def connect(*_: object) -> _Dial:
            dials.append(_Dial())
            return dials[-1]

        fleet = Fleet(FleetConfig({MODEL.name: MODEL}, 10.0), connect, lambda: 0.0)  # type: ignore[arg-type]
        fleet.register(info)
        await asyncio.sleep(0)
        dials[0].opened.set_result(None)
        fleet.register(replace(info, key=replace(info.key, incarnation=info.key.incarnation + 1)))
        await asyncio.wait_for(fleet.close(), 20.0)
        assert dials[0].is_closed
