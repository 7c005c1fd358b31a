"""What a benchmark's figures are held against, for people and machines alike. Measures nothing."""

from dataclasses import asdict, dataclass
from typing import Literal

Op = Literal["<=", ">="]


@dataclass(frozen=True, slots=True)
class Target:
    """One figure and the bound it must keep. `noise`: cores that other processes used while it was measured."""

    name: str
    unit: str
    op: Op
    value: float
    target: float
    noise: float

    @property
    def met(self) -> bool:
        """Not for a value that is no number."""
        return self.value <= self.target if self.op == "<=" else self.value >= self.target

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "met": self.met}
