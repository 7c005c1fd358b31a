"""What a request's output must be: the engine's own, alone in a process, on the same weights and kernels.

Results do not depend on neighbours, chunks, threads or topology, so that every fleet of ours must give the same tokens.
"""

import json
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import Self, cast

from pdserve_bench.load.plan import LoadPlan
from pdserve_bench.load.records import RunResult
from pdserve_bench.measures.outputs import pick, wrong_numbers

_CHILD = "pdserve_bench.study.reference_child"


class Reference:
    """Starts its process when it is first asked, and ends it with the context; in between it waits, and takes no time.
    It has a session of its own, so that a terminal's Ctrl-C does not reach it.

    Args:
        max_tokens: the most that a request has, prompt and output.
    """

    def __init__(self, source: Path, dtype: str = "bfloat16", block_size: int = 16, max_tokens: int = 8192) -> None:
        self._command = [sys.executable, "-m", _CHILD, str(source), dtype, str(block_size), str(max_tokens)]
        self._process: subprocess.Popen[str] | None = None

    def output(self, token_ids: tuple[int, ...], max_tokens: int) -> list[int]:
        """Greedy.

        Raises:
            RuntimeError: the process ended; what it said is on stderr.
        """
        process = self._process = self._process or subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps([list(token_ids), max_tokens]) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise RuntimeError(f"the reference engine ended with exit code {process.wait()}")
        return cast(list[int], json.loads(answer))

    def wrong(self, plan: LoadPlan, run: RunResult, count: int) -> Collection[int]:
        """Numbers of those among `count` completed requests whose tokens are not the reference's. `plan`: as sent."""
        by_number = {request.number: request for request in plan.requests}
        chosen = [(record, by_number[record.number]) for record in pick(run.records, count, plan.seed)]
        expected = {
            record.number: " ".join(map(str, self.output(request.token_ids, request.max_tokens)))
            for record, request in chosen
        }
        return wrong_numbers([record for record, _ in chosen], expected)

    def close(self) -> None:
        """It ends by itself once nobody can ask any more."""
        process, self._process = self._process, None
        if process is not None:
            process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
