"""The engine thread: schedule, run, publish. It owns the device, the block pool and every stage's state.

The rest of the process reaches it through `call` (a function to run between two steps) and hears from it through
`publish`, once per turn of the loop. It blocks on its inbox when there is nothing to compute; it never polls.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

from pdserve.core.block_keys import PrefixGroup, PrefixScope
from pdserve.core.errors import PdserveError
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.cached_prefix import CachedPrefix
from pdserve.engine.events import Event, StageSnapshot
from pdserve.engine.interfaces import Runner, Stage

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StageResources:
    """What the stages of one engine share. `prefix_scope` None: no prefix is cached."""

    pool: BlockPool
    block_size: int
    eos_token_ids: frozenset[int]
    prefix_scope: PrefixScope | None = None

    def cached_prefix(self, group: PrefixGroup) -> CachedPrefix | None:
        """The prefix cache, as a new sequence of the group meets it."""
        return None if self.prefix_scope is None else CachedPrefix(self.pool, self.prefix_scope.key_chain(group))


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the loop: commands were handled, and perhaps a step was run. Both by stage, in their order."""

    events: tuple[list[Event], ...]
    snapshots: tuple[StageSnapshot, ...]


@dataclass(slots=True)
class EngineThread:
    """Drives `stages` with one `runner`.

    Args:
        publish: called on the engine thread after every turn; it must not block.
        on_crash: called on the engine thread, as its last act, if a stage broke its own rules. The process should end:
            a worker that cannot account for its blocks must not serve.
    """

    runner: Runner
    stages: Seq[Stage]
    publish: Callable[[Turn], None]
    on_crash: Callable[[BaseException], None]
    clock: Callable[[], float] = time.monotonic
    step_count: int = 0
    _inbox: queue.SimpleQueue[Callable[[], object] | None] = field(
        default_factory=queue.SimpleQueue[Callable[[], object] | None]
    )
    _thread: threading.Thread | None = None

    @property
    def has_work(self) -> bool:
        return any(stage.has_work for stage in self.stages)

    @property
    def has_commands(self) -> bool:
        """Whether something was posted that has not been run yet."""
        return not self._inbox.empty()

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Finish the current turn and end the thread. Calls posted later are never run."""
        self._inbox.put(None)
        if self._thread is not None:
            self._thread.join()

    def call(self, function: Callable[[], T]) -> "Future[T]":
        """Run `function` on the engine thread between two steps; from any thread.

        A PdserveError is the caller's to hear. Anything else ends the engine, too: see `on_crash`.
        """
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
                if not isinstance(error, PdserveError):
                    raise

        self._inbox.put(run)
        return future

    def post(self, function: Callable[[], object]) -> None:
        """As `call`, for what needs no answer and cannot be refused."""
        self._inbox.put(function)

    def _run(self) -> None:
        try:
            while self._drain_inbox():
                if self.has_work:
                    self.step()
                self.publish(self._turn())
        except BaseException as error:
            logger.critical("the engine thread ends", exc_info=error)
            self.on_crash(error)

    def _drain_inbox(self) -> bool:
        """Run what was posted, waiting for it if there is nothing else to do. False: stop."""
        wait = not self.has_work
        while True:
            try:
                function = self._inbox.get(block=wait)
            except queue.Empty:
                return True
            if function is None:
                return False
            function()
            wait = False

    def _turn(self) -> Turn:
        events = tuple(stage.take_events() for stage in self.stages)
        return Turn(events, tuple(stage.snapshot() for stage in self.stages))

    def step(self) -> None:
        plans = [stage.plan(self.clock()) for stage in self.stages]
        chunks = [chunk for plan in plans for chunk in plan]
        if not chunks:
            return
        try:
            results = self.runner.run(chunks)
        except Exception as error:
            logger.exception("the forward pass of %d chunks failed", len(chunks))
            for stage, plan in zip(self.stages, plans, strict=True):
                stage.fail(plan, error)
            self.step_count += 1
            return
        now_s = self.clock()
        start = 0
        for stage, plan in zip(self.stages, plans, strict=True):
            stage.apply(plan, results[start : start + len(plan)], now_s)
            start += len(plan)
        self.step_count += 1
