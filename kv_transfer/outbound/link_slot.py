"""Holds a pair's current link: makes one with the next epoch, drops it, or cuts it from another thread for good.

A link that breaks is followed by one of the next transport, as long as there is another: what broke once may break
again, and the pair is made anew when it was idle for a while.
"""

import threading
from collections.abc import Callable, Iterator

from kv_transfer.outbound.link import Link


class LinkSlot:
    """At most one link. `renew` and `drop` belong to the pair's thread; `cut` may come from any."""

    def __init__(self, make_link: Callable[[int, int], Link], epochs: Iterator[int]) -> None:
        """`make_link`: (epoch, how many of the pair's links broke) to an unconnected one."""
        self._make_link = make_link
        self._num_broken = 0
        self._epochs = epochs
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._cut = False

    @property
    def link(self) -> Link | None:
        return self._link

    def renew(self) -> Link:
        """A new, unconnected link; after `cut`, a closed one."""
        link = self._make_link(next(self._epochs), self._num_broken)
        with self._lock:
            self._link = link
            cut = self._cut
        if cut:
            link.close()
        return link

    def drop(self) -> None:
        with self._lock:
            link, self._link = self._link, None
        if link is not None:
            link.close()

    def drop_broken(self) -> None:
        self._num_broken += 1
        self.drop()

    def cut(self) -> None:
        """Fail the running call, if any, and every later one."""
        with self._lock:
            self._cut = True
            link = self._link
        if link is not None:
            link.close()
