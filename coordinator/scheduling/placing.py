"""How the sequence whose turn it is gets its workers: ranks pairs, asks decode workers for blocks, waits for changes.

Each Reserve is asked under a Hold, entered before the question: whatever comes of it, the hold's end frees it.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from coordinator.fleet.membership import Fleet
from coordinator.fleet.values import Denied, Granted, Role, Target, WorkerKey
from coordinator.fleet.worker import Hold, OutputSink, Worker
from coordinator.scheduling.routing import (
    Need,
    Pair,
    WorkerView,
    has_prefill_room,
    pair_has_room,
    rank_decode,
    rank_pairs,
    rank_prefill,
)
from coordinator.sequences import SequenceRequest
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.core.ids import SequenceId

RECHECK_S = 1.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PlacingConfig:
    """`transports` in order of preference. A head that finds no worker for `no_workers_after_s` gives up."""

    transports: tuple[str, ...]
    no_workers_after_s: float


@dataclass(frozen=True, slots=True)
class Placement:
    """Both workers, held. `decode` and `target` are None where one token is wanted."""

    prefill: Hold
    decode: Hold | None = None
    target: Target | None = None


class _Refusals:
    """Which decode workers need not be asked again yet."""

    def __init__(self) -> None:
        self._denied: dict[WorkerKey, tuple[int, int]] = {}
        self._failed_s: dict[WorkerKey, float] = {}
        self._never: set[WorkerKey] = set()

    def denied(self, view: WorkerView, answer: Denied) -> None:
        if answer.never_fits:
            self._never.add(view.key)
        self._denied[view.key] = (answer.ledger_version, view.num_releases)

    def failed(self, key: WorkerKey, now_s: float) -> None:
        self._failed_s[key] = now_s

    def for_ever(self, key: WorkerKey) -> bool:
        return key in self._never

    def forbid(self, view: WorkerView, now_s: float) -> bool:
        """True until its ledger's version moves on or a sequence of ours ends there; after a failure, for a while."""
        if view.key in self._never or now_s < self._failed_s.get(view.key, -RECHECK_S) + RECHECK_S:
            return True
        version, num_releases = self._denied.get(view.key, (-1, -1))
        return view.ledger_version <= version and view.num_releases == num_releases


class Placer:
    """Places one sequence, once. Every question that may have left something at a worker uses up a wire id."""

    def __init__(
        self,
        fleet: Fleet,
        config: PlacingConfig,
        clock: Callable[[], float],
        request: SequenceRequest,
        new_id: Callable[[], SequenceId],
        sink: OutputSink,
    ) -> None:
        self._fleet = fleet
        self._config = config
        self._clock = clock
        self._request = request
        self._new_id = new_id
        self._sink = sink
        self._need = Need(len(request.token_ids), request.num_tokens_max)
        self._refusals = _Refusals()

    async def place(self, holds: ExitStack, stopped: "asyncio.Future[None]") -> Placement | None:
        """Wait until the sequence has its workers, held by `holds`; None once `stopped` is done.

        Raises:
            PdserveError: NEVER_FITS, NO_WORKERS.
        """
        first_look_s = self._clock()
        while not stopped.done():
            changed = self._fleet.changes.next()
            views = self._fleet.views(self._request.model)
            placement = await self._try(views, holds, stopped)
            if placement is not None:
                return placement
            if not stopped.done():
                self._check_hope(views, self._clock() - first_look_s)
                await asyncio.wait((changed, stopped), timeout=RECHECK_S, return_when=asyncio.FIRST_COMPLETED)
        return None

    async def _try(
        self, views: list[WorkerView], holds: ExitStack, stopped: "asyncio.Future[None]"
    ) -> Placement | None:
        if self._request.sampling.max_tokens == 1:
            return self._place_prefill_only(views, holds)
        for pair in rank_pairs(views, self._need, self._config.transports):
            decode = self._fleet.find(pair.decode.key)
            if decode is None or not pair_has_room(pair, self._need):
                continue
            if not self._refusals.forbid(decode.view(), self._clock()):
                placement = await self._try_pair(pair, decode, holds)
                if placement is not None or stopped.done():
                    return placement
        return None

    def _place_prefill_only(self, views: list[WorkerView], holds: ExitStack) -> Placement | None:
        for view in rank_prefill(views, self._need):
            worker = self._fleet.find(view.key)
            if worker is not None and has_prefill_room(view, self._need):
                return Placement(holds.enter_context(self._hold(worker, Role.PREFILL, self._new_id())))
        return None

    async def _try_pair(self, pair: Pair, decode: Worker, holds: ExitStack) -> Placement | None:
        hold = holds.enter_context(self._hold(decode, Role.DECODE, self._new_id()))
        granted = await self._reserve(hold)
        prefill = self._fleet.find(pair.prefill.key)
        if granted is None or prefill is None or decode.gone:
            hold.leave()
            return None
        target = Target(decode.info, pair.kv_layout, pair.transport, granted.reservation_id, granted.num_cached_blocks)
        return Placement(
            holds.enter_context(self._hold(prefill, Role.PREFILL, hold.sequence_id)), decode=hold, target=target
        )

    async def _reserve(self, hold: Hold) -> Granted | None:
        worker = hold.worker
        remaining_s = self._request.deadline_s - self._clock()
        if remaining_s <= 0:
            hold.refused = True
            return None
        hold.asking = True
        try:
            answer = await worker.client().reserve(hold.sequence_id, self._request, remaining_s)
        except PdserveError as error:
            logger.warning("worker %s: no answer to a reservation: %s", worker.info.key, error)
            self._refusals.failed(worker.info.key, self._clock())
            return None
        finally:
            hold.asking = False
        if isinstance(answer, Denied):
            hold.refused = True
            self._refusals.denied(worker.view(), answer)
            return None
        return answer

    def _hold(self, worker: Worker, role: Role, sequence_id: SequenceId) -> Hold:
        num_tokens = self._need.num_prompt_tokens if role is Role.PREFILL else self._need.num_tokens_max
        return Hold(worker, role, sequence_id, self._sink, num_tokens)

    def _check_hope(self, views: list[WorkerView], waited_s: float) -> None:
        prefills = rank_prefill(views, self._need)
        decodes = [view for view in rank_decode(views, self._need) if not self._refusals.for_ever(view.key)]
        if self._request.sampling.max_tokens == 1:
            hopeful, fits, roles = bool(prefills), bool(prefills), [Role.PREFILL]
        else:
            pairs = rank_pairs(views, self._need, self._config.transports)
            hopeful = any(not self._refusals.for_ever(pair.decode.key) for pair in pairs)
            fits, roles = bool(prefills and decodes), [Role.PREFILL, Role.DECODE]
        if hopeful:
            return
        if not fits and all(any(view.can(role) for view in views) for role in roles):
            raise PdserveError(ErrorReason.NEVER_FITS, "no worker that is left can hold prompt + max_tokens")
        if waited_s > self._config.no_workers_after_s:
            raise PdserveError(
                ErrorReason.NO_WORKERS,
                f"no worker for {self._request.model} could take the sequence for {waited_s:.0f} s",
                retry_after_s=1.0,
            )
