"""When a sequence passed each phase boundary, and the durations that follow. Readings of the clock are arguments."""

from dataclasses import dataclass

from coordinator.sequences import SequencePhase, SequenceTimings


@dataclass(slots=True)
class PhaseStamps:
    """Of a sequence's last attempt; None: not reached. Queue, reserve and prefill add up to TTFT by construction."""

    arrival_s: float
    turn_s: float | None = None
    placed_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    ended_s: float | None = None
    exposed_transfer_s: float = 0.0
    prefill_worker: str = ""
    decode_worker: str = ""

    @property
    def phase(self) -> SequencePhase:
        if self.ended_s is not None:
            return SequencePhase.ENDED
        if self.first_token_s is not None:
            return SequencePhase.DECODE
        if self.placed_s is not None:
            return SequencePhase.PREFILL
        return SequencePhase.QUEUED if self.turn_s is None else SequencePhase.RESERVING

    def timings(self, now_s: float) -> SequenceTimings:
        """Seconds per phase, up to `now_s` where the sequence goes on; a phase that was not reached took none."""
        end_s = now_s if self.ended_s is None else self.ended_s
        turn_s = end_s if self.turn_s is None else self.turn_s
        placed_s = end_s if self.placed_s is None else self.placed_s
        first_s = end_s if self.first_token_s is None else self.first_token_s
        return SequenceTimings(
            queue_s=turn_s - self.arrival_s,
            reserve_s=placed_s - turn_s,
            prefill_s=first_s - placed_s,
            exposed_transfer_s=self.exposed_transfer_s,
            decode_s=end_s - first_s,
            ttft_s=0.0 if self.first_token_s is None else first_s - self.arrival_s,
            prefill_worker=self.prefill_worker,
            decode_worker=self.decode_worker,
        )
