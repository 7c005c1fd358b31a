"""`python -m pdserve_kernels.compile_all`: compile the native kernels now rather than at a worker's first start."""

import sys
import time

from pdserve_kernels.host import why_not_here


def main() -> None:
    """Say what was done, on stderr."""
    refusal = why_not_here()
    if refusal:
        print(f"native kernels cannot run here: {refusal}", file=sys.stderr)  # noqa: T201
        return
    begin_s = time.perf_counter()
    from pdserve_kernels.cpu import compiled, program

    took_s, place = time.perf_counter() - begin_s, compiled.cache_folder()
    print(f"{program.NUM_FUNCTIONS} native kernels after {took_s:.1f} s, in {place}", file=sys.stderr)  # noqa: T201


if __name__ == "__main__":
    main()
