"""Threads that run a kernel together: the OpenMP team that torch has already, so that no second pool competes with it.

GNU's entry points are used, which LLVM's and Intel's runtimes offer too.
"""

import ctypes
import re
from dataclasses import dataclass
from pathlib import Path

import torch

_RUNTIME = re.compile(r"/lib(gomp|iomp5|omp)\b[^/]*$")


@dataclass(frozen=True, slots=True)
class Team:
    """`run` calls a C function `void (void *)` on all threads. Addresses are for kernels; 0 with one thread.

    `num_threads` is the most that come: OpenMP may grant fewer (OMP_THREAD_LIMIT, OMP_DYNAMIC), so a kernel asks.
    `give_way`: see `meeting.meet`.
    """

    num_threads: int
    give_way: int = 0
    thread_number: int = 0
    thread_count: int = 0
    parallel: int = 0

    def run(self, function: int, argument: int) -> None:
        """Returns when every thread has. Python's lock is not held meanwhile."""
        if self.num_threads == 1:
            _CALL(function)(argument)
        else:
            _PARALLEL(self.parallel)(function, argument, self.num_threads, 0)


_CALL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_PARALLEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)


def make_team(num_threads: int) -> Team:
    """A team of `num_threads`, or of one where torch brought no OpenMP that we know."""
    path = _openmp_library() if num_threads > 1 else None
    if path is None:
        return Team(1)
    library = ctypes.CDLL(path)
    names = ("omp_get_thread_num", "omp_get_num_threads", "GOMP_parallel")
    functions = [ctypes.CDLL(None).sched_yield, *(getattr(library, name) for name in names)]
    return Team(num_threads, *(ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions))


def _openmp_library() -> str | None:
    """The one that this process has loaded."""
    torch.get_num_threads()
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    paths = [path for line in lines if (path := line.split(maxsplit=5)[-1]) and _RUNTIME.search(path)]
    torch_folder = str(Path(torch.__file__).parent)
    paths.sort(key=lambda path: not path.startswith(torch_folder))
    return paths[0] if paths else None
