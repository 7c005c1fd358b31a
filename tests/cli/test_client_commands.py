"""`status` and `generate` against a coordinator that answers from a script."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from pdserve.cli.answer import percentile, printable
from pdserve.cli.app import app, run
from pdserve.client.channels import sync_server
from pdserve.client.errors import error_metadata
from pdserve.core.errors import ErrorReason, PdserveError
from pdserve.v1 import common_pb2, fleet_pb2, fleet_pb2_grpc, inference_pb2, inference_pb2_grpc

Responses = list[inference_pb2.GenerateResponse]


class Coordinator(fleet_pb2_grpc.FleetServicer, inference_pb2_grpc.InferenceServicer):
    """Answers with `fleet` and `responses`, then fails with `error` if there is one; keeps what it was asked."""

    def __init__(self) -> None:
        self.fleet = fleet_pb2.FleetStatus()
        self.responses: Responses = []
        self.error: PdserveError | None = None
        self.requests: list[inference_pb2.GenerateRequest] = []
        self.metadata: dict[str, str | bytes] = {}

    def GetStatus(self, request: Any, context: Any) -> fleet_pb2.FleetStatus:
        return self.fleet

    def Generate(self, request: Any, context: Any) -> Iterator[inference_pb2.GenerateResponse]:
        self.requests.append(request)
        self.metadata = dict(context.invocation_metadata())
        yield from self.responses
        if self.error is not None:
            context.set_trailing_metadata(error_metadata(self.error))
            context.abort(grpc.StatusCode[self.error.codes.grpc_status], self.error.message)


@pytest.fixture
def coordinator() -> Coordinator:
    return Coordinator()


@pytest.fixture
def address(coordinator: Coordinator) -> Iterator[str]:
    server = sync_server(2)
    fleet_pb2_grpc.add_FleetServicer_to_server(coordinator, server)
    inference_pb2_grpc.add_InferenceServicer_to_server(coordinator, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait(30)


def _invoke(*arguments: str, columns: int = 200) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": str(columns)}, catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


def _ended(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    monkeypatch.setattr("sys.argv", ["pdserve", *arguments])
    with pytest.raises(SystemExit) as ended:
        run()
    assert isinstance(ended.value.code, int)
    return ended.value.code, capsys.readouterr().err


def _fleet() -> fleet_pb2.FleetStatus:
    load = fleet_pb2.LoadReport(
        num_reserved_blocks=1234,
        num_usable_blocks=4321,
        num_running=7,
        totals=fleet_pb2.WorkerTotals(decodes_completed=42, transferred_bytes=5_000_000),
    )
    worker = fleet_pb2.WorkerStatus(
        worker=fleet_pb2.WorkerId(worker_id="decode-0"), state="ready", control_address="127.0.0.1:9", load=load
    )
    return fleet_pb2.FleetStatus(
        pools=[
            fleet_pb2.PoolStatus(model_name="m", role=fleet_pb2.ROLE_PREFILL),
            fleet_pb2.PoolStatus(model_name="m", role=fleet_pb2.ROLE_DECODE, workers=[worker]),
        ],
        queues=[fleet_pb2.QueueStatus(model_name="m", num_requests=3, max_requests=256)],
        requests_by_outcome={"stop": 5, "cancelled": 1},
        uptime_s=61,
        coordinator_incarnation=2**63 + 1,
    )


def test_status_shows_pools_queues_and_totals(coordinator: Coordinator, address: str) -> None:
    coordinator.fleet.CopyFrom(_fleet())
    code, out, _ = _invoke("status", "--address", address, columns=80)
    assert code == 0
    lines = [line.split() for line in out.splitlines()]
    assert ["prefill", "none"] in lines
    assert ["decode", "decode-0", "ready", "0", "7", "0", "0", "0"] in lines
    assert ["decode-0", "m", "127.0.0.1:9"] in lines
    assert ["decode-0", "1,234", "0", "0", "4,321"] in lines
    assert ["m", "3", "256", "0", "0"] in lines
    assert ["decode-0", "0", "0", "42", "0", "0", "5"] in lines
    assert ["decode-0", "0", "0", "0", "0", "0"] in lines
    assert "…" not in out
    assert "up 61 s; 0 in flight; requests by outcome: cancelled 1, stop 5" in out


def test_status_json_has_every_field_and_loses_no_digit(coordinator: Coordinator, address: str) -> None:
    coordinator.fleet.CopyFrom(_fleet())
    code, out, _ = _invoke("status", "--json", "--address", address)
    assert code == 0
    report = json.loads(out)
    assert report["coordinator_incarnation"] == str(2**63 + 1)
    (worker,) = report["pools"][1]["workers"]
    assert worker["load"]["totals"]["decodes_completed"] == "42"
    assert worker["load"]["num_free_blocks"] == 0
    assert report["draining"] is False


def _responses() -> Responses:
    response = inference_pb2.GenerateResponse
    return [
        response(started=response.Started(num_prompt_tokens=4, seed=99)),
        response(delta=response.Delta(first_index=0, token_ids=[1], text="Hel")),
        response(delta=response.Delta(first_index=1, token_ids=[2], text="lo\x1b[2J")),
        response(
            finished=response.Finished(
                finish_reason=common_pb2.FINISH_REASON_STOP,
                usage=inference_pb2.Usage(prompt_tokens=4, completion_tokens=2),
                timings=inference_pb2.Timings(prefill_worker="prefill-0", decode_worker="decode-1"),
            )
        ),
    ]


def test_generate_streams_text_then_says_who_did_what(coordinator: Coordinator, address: str) -> None:
    coordinator.responses = _responses()
    flags = ["--max-tokens", "5", "--temperature", "0", "--seed", "3", "--api-key", "k"]
    code, out, err = _invoke("generate", "Hi [bold]", "--address", address, *flags)
    assert (code, out) == (0, "Hello[2J\n")
    for expected in ("4 prompt, 2 output (stop)", "TTFT", "ITL", "p50", "prefill-0", "decode-1", "99"):
        assert expected in err
    (request,) = coordinator.requests
    assert request.chat.messages[0].content == "Hi [bold]"
    assert (request.sampling.max_tokens, request.sampling.temperature, request.sampling.seed) == (5, 0.0, 3)
    assert request.sampling.HasField("temperature")
    assert not request.sampling.HasField("top_p")
    assert coordinator.metadata["authorization"] == "Bearer k"


def test_raw_prompts_are_sent_as_text(coordinator: Coordinator, address: str) -> None:
    coordinator.responses = _responses()
    result = CliRunner().invoke(app, ["generate", "-", "--raw", "--address", address], input="from a pipe")
    assert result.exit_code == 0
    assert coordinator.requests[0].text == "from a pipe"
    assert not coordinator.requests[0].sampling.HasField("seed")
    assert "authorization" not in coordinator.metadata


def test_a_typed_refusal_is_shown_with_its_reason(
    coordinator: Coordinator, address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    coordinator.error = PdserveError(ErrorReason.QUEUE_FULL, "256 requests wait", retry_after_s=2.0)
    ended = _ended(monkeypatch, capsys, "generate", "Hi", "--address", address)
    assert ended == (1, "error: queue_full: 256 requests wait (retry after 2 s)\n")


def test_a_stream_without_a_finish_is_a_failure(coordinator: Coordinator, address: str) -> None:
    coordinator.responses = _responses()[:-1]
    code, _, err = _invoke("generate", "Hi", "--address", address)
    assert (code, err) == (1, "error: the stream ended without a finish\n")


@pytest.mark.parametrize("arguments", [["status"], ["status", "--json"], ["generate", "Hi"]])
def test_an_unreachable_server_is_one_line(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, err = _ended(monkeypatch, capsys, *arguments, "--address", "127.0.0.1:1")
    assert code == 1
    assert len(err.splitlines()) == 1
    assert err.startswith("error: cannot reach 127.0.0.1:1: is `pdserve serve` running there?")


def test_an_http_url_for_an_address_is_told_what_is_wanted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, err = _ended(monkeypatch, capsys, "status", "--address", "http://127.0.0.1:1")
    assert code == 1
    assert "HOST:PORT of its gRPC, not the HTTP port or a URL" in err


@pytest.mark.parametrize(("message", "hinted"), [("model 'm' has no chat template", True), ("too long", False)])
def test_a_model_without_a_chat_template_is_told_with_the_flag_that_helps(
    coordinator: Coordinator,
    address: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    message: str,
    hinted: bool,
) -> None:
    coordinator.error = PdserveError(ErrorReason.INVALID_ARGUMENT, message, param="messages")
    code, err = _ended(monkeypatch, capsys, "generate", "Hi", "--address", address)
    assert code == 1
    assert err.startswith(f"error: {message}")
    assert ("--raw" in err) is hinted


def test_flags_reach_the_request_and_what_was_not_given_stays_unset(
    coordinator: Coordinator, address: str, tmp_path: Path
) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text('[{"type": "function", "function": {"name": "f"}}]')
    coordinator.responses = _responses()
    flags = ["--stop", "a", "--stop", "b", "--top-p", "0.5", "--tools", str(tools)]
    assert _invoke("generate", "x", "--address", address, *flags)[0] == 0
    assert _invoke("generate", "x", "--raw", "--echo", "--address", address)[0] == 0
    chat, raw = coordinator.requests
    assert (list(chat.sampling.stop), chat.sampling.top_p) == (["a", "b"], 0.5)
    assert json.loads(chat.chat.tools_json) == json.loads(tools.read_text())
    empty = inference_pb2.SamplingOptions()
    assert raw == inference_pb2.GenerateRequest(text="x", echo=True, sampling=empty)


@pytest.mark.parametrize("content", ["{}", "[", None])
def test_a_file_that_is_no_list_of_tools_is_wrong_usage(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "tools.json"
    if content is not None:
        path.write_text(content)
    code, _, err = _invoke("generate", "x", "--tools", str(path), "--address", "127.0.0.1:1")
    assert code == 2
    assert str(path) in err


def test_the_prompt_comes_first_and_tool_calls_last(coordinator: Coordinator, address: str) -> None:
    response = inference_pb2.GenerateResponse
    call = inference_pb2.ToolCall(id="1", name="add", arguments_json='{"a": 1}')
    coordinator.responses = [
        response(delta=response.Delta(is_prompt=True, text="2 + 2")),
        response(delta=response.Delta(text=" is", tool_calls=[call])),
        response(delta=response.Delta(text=" 4")),
        *_responses()[-1:],
    ]
    code, out, _ = _invoke("generate", "2 + 2", "--raw", "--echo", "--address", address)
    assert (code, out) == (0, '2 + 2 is 4\nadd({"a": 1})\n')


@pytest.mark.parametrize(("percent", "expected"), [(50, 2.0), (99, 4.0), (0, 1.0), (75, 3.0)])
def test_percentiles_by_nearest_rank(percent: float, expected: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], percent) == expected


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert printable("a\tb\nc\x1b\x07\r\x7fé\u200d") == "a\tb\ncé\u200d"
