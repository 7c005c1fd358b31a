"""Identities that are never reused."""

import secrets
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class SequenceId:
    """One sequence of one request: unique for ever across coordinators and their restarts."""

    coordinator_incarnation: int
    sequence: int

    def __str__(self) -> str:
        return f"{self.coordinator_incarnation:016x}-{self.sequence}"


def new_incarnation() -> int:
    """A random non-zero u64 that tells one run of a process from every other."""
    return secrets.randbits(64) or 1
