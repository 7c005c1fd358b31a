"""In which order fleets are measured. Pure: measures nothing."""

from collections.abc import Sequence
from dataclasses import dataclass

AGAIN = " (again)"


@dataclass(frozen=True, slots=True)
class Cell:
    """One fleet under one load, once. `again`: the control's second turn within its round."""

    rate_factor: float
    repeat: int
    fleet: str
    again: bool = False

    @property
    def label(self) -> str:
        return self.fleet + AGAIN if self.again else self.fleet

    @property
    def key(self) -> str:
        """Its name among all cells of a comparison."""
        return f"rate {self.rate_factor:g}, repeat {self.repeat}, {self.label}"


def schedule(
    fleets: Sequence[str], rate_factors: Sequence[float], num_repeats: int, control: str | None
) -> tuple[Cell, ...]:
    """Rounds, each of one repeat of one rate: all fleets in turn, and `control` a second time (A/A).

    What is compared is thus close in time, so that a drift of the machine cancels. Who begins moves on by one with each
    round; the control's two turns are as far apart as those of different fleets are.

    Raises:
        ValueError: a fleet or a rate comes twice, the control is none of the fleets, or nothing is to be measured.
    """
    _check(fleets, rate_factors, num_repeats, control)
    turns = [(fleet, False) for fleet in fleets]
    if control is not None:
        first = fleets.index(control)
        turns = [*turns[first:], *turns[:first], (control, True)]
    cells: list[Cell] = []
    rounds = [(repeat, rate_factor) for repeat in range(num_repeats) for rate_factor in rate_factors]
    for number, (repeat, rate_factor) in enumerate(rounds):
        first = number % len(turns)
        cells += [Cell(rate_factor, repeat, *turn) for turn in (*turns[first:], *turns[:first])]
    return tuple(cells)


def _check(fleets: Sequence[str], rate_factors: Sequence[float], num_repeats: int, control: str | None) -> None:
    if not fleets or not rate_factors or num_repeats < 1:
        raise ValueError(f"{len(fleets)} fleets, {len(rate_factors)} rates, {num_repeats} repeats: nothing to measure")
    for what, values in (("fleets", fleets), ("rates", rate_factors)):
        if len(set(values)) < len(values):
            raise ValueError(f"{what} must differ: {', '.join(map(str, values))}")
    if control is not None and control not in fleets:
        raise ValueError(f"the control {control!r} is none of the fleets: {', '.join(fleets)}")
