from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from catenary_apps.cli.main import main
from catenary_apps.load import TokenizerText
from tests.support.bench_command import bench_serve, origin_in_a_thread
from tests.support.sse_origin import Exchange, Origin, polite
from tests.support.tiny_tokenizer import write_tiny_model


@pytest.fixture
def origin() -> Iterator[Origin]:
    with origin_in_a_thread() as origin:
        yield origin


def test_a_table_says_what_was_measured(origin: Origin, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_serve(origin, "--goodput", "ttft:10000,e2e:20000", "--max-concurrency", "2") == 0
    captured = capsys.readouterr()
    assert "3 answered, 0 failed" in captured.out
    assert "goodput/s (ttft 10000 ms, e2e 20000 ms)" in captured.out
    assert "time to first token" in captured.out
    assert captured.err == ""
    assert len(origin.exchanges) == 4
    assert all(len(body["prompt"]) == 5 and body["max_tokens"] == 4 for body in origin.bodies)


def test_json_goes_to_the_output_and_to_a_file(
    origin: Origin, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    words = [
        "--json",
        "--save",
        str(file),
        "--save-requests",
        "--api-key",
        "hidden",
        "--header",
        "X-A=secret",
    ]
    assert bench_serve(origin, *words, "--request-rate", "500", "--percentiles", "50,99.9") == 0
    printed, written = json.loads(capsys.readouterr().out), json.loads(file.read_text())
    assert printed == written
    assert (written["schema"], written["benchmark"], written["swept"]) == (1, "serve", None)
    (run,) = written["runs"]
    assert run["completed"] == 3
    assert run["latency_from"] == "schedule"
    assert set(run["ttft_ms"]["percentiles"]) == {"p50", "p99.9"}
    assert len(run["requests"]) == 3
    assert written["options"]["request_rate"] == 500
    assert "hidden" not in file.read_text()
    assert "secret" not in file.read_text()
    assert origin.exchanges[0].headers["authorization"] == "Bearer hidden"
    assert origin.exchanges[0].headers["x-a"] == "secret"


def test_the_same_seed_asks_the_same(origin: Origin) -> None:
    for seed in ("7", "7", "8"):
        assert bench_serve(origin, "--seed", seed, "--max-concurrency", "1") == 0
    first, second, third = (origin.bodies[start : start + 4] for start in (0, 4, 8))
    assert first == second
    assert first != third


@pytest.mark.parametrize("sweep", ["concurrency=1,2", "rate=200,400"])
def test_a_sweep_has_a_line_and_prompts_of_its_own_for_each_value(
    origin: Origin, sweep: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "sweep.json"
    assert bench_serve(origin, "--sweep", sweep, "--save", str(file)) == 0
    written = json.loads(file.read_text())
    assert [run["value"] for run in written["runs"]] == [float(one) for one in sweep.split("=")[1].split(",")]
    assert written["swept"] == sweep.split("=")[0]
    out = capsys.readouterr().out
    assert "TTFT p50" in out
    prompts = [tuple(body["prompt"]) for body in origin.bodies]
    assert len(set(prompts)) == len(prompts) == 8


def test_a_sweep_that_breaks_off_keeps_what_it_has(
    origin: Origin, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def only_one_run(exchange: Exchange) -> None:
        await (polite(exchange) if exchange.number < 4 else exchange.refuse(503, "enough"))

    origin.behaviour = only_one_run
    file = tmp_path / "sweep.json"
    assert bench_serve(origin, "--sweep", "concurrency=1,2,4", "--save", str(file)) == 1
    assert [run["value"] for run in json.loads(file.read_text())["runs"]] == [1]
    captured = capsys.readouterr()
    assert "TTFT p50" in captured.out
    assert captured.err == ("catenary bench serve: no request of the warm-up worked: http_503: enough\n")


def test_chats_without_a_tokenizer_are_plain_words(origin: Origin) -> None:
    assert (
        bench_serve(origin, "--endpoint", "chat", "--temperature", "0", "--extra-body", '{"top_k": 1}') == 0
    )
    body = origin.bodies[0]
    assert len(body["messages"][0]["content"].split()) == 5
    assert (body["temperature"], body["top_k"]) == (0, 1)


def test_nothing_answered_is_exit_code_1(origin: Origin, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_serve(origin, "--model", "refused") == 1
    assert capsys.readouterr().err == (
        "catenary bench serve: no request of the warm-up worked: http_503: not now\n"
    )
    assert bench_serve(origin, "--model", "refused", "--warmup", "0") == 1
    out = capsys.readouterr().out
    assert "failed: http_503 3; the first: http_503: not now" in " ".join(out.split())
    assert main(["bench", "serve", "--base-url", "http://127.0.0.1:1"]) == 1
    assert "no answer from http://127.0.0.1:1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--request-rate 0", "--request-rate"),
        ("--request-rate -inf", "--request-rate"),
        ("--num-warmups 3", "unknown option --num-warmups; in its place: --warmup"),
        ("--metadata x", "--metadata: NAME=VALUE"),
        ("--request-id-prefix a\x7fb", "is not a header that can be sent"),
        ("--ready-timeout-s -1", "--ready-timeout-s"),
        ("--burstiness 2", "--burstiness needs --request-rate"),
        ("--ramp-up linear", "--ramp-up-from"),
        ("--ramp-up-from 1", "--ramp-up linear or exponential"),
        ("--ramp-up linear --ramp-up-from 1 --ramp-up-to 2 --request-rate 1", "a ramp takes the place"),
        ("--input-len x", "--input-len 'x'"),
        ("--output-len uniform:9:1", "--output-len"),
        ("--token-ids 5:5", "--token-ids"),
        ("--token-ids x", "--token-ids"),
        ("--goodput ttft", "'ttft' is no objective"),
        ("--percentiles 101", "--percentiles"),
        ("--sweep x=1", "--sweep"),
        ("--sweep rate=", "--sweep"),
        ("--sweep concurrency=1.5", "whole numbers"),
        ("--sweep rate=1 --request-rate 2", "takes the place"),
        ("--sweep concurrency=1 --max-concurrency 2", "takes the place"),
        ("--base-url ftp://x", "expected the URL of a server"),
        ("--extra-body [1]", "--extra-body is not a JSON object"),
        ("--header x", "--header: NAME=VALUE"),
        ("--dataset sharegpt --output-len 5", "--dataset sharegpt needs --dataset-path"),
        ("--dataset sharegpt --dataset-path none", "needs --tokenizer, or --output-len"),
        ("--dataset lines --dataset-path /nowhere", "--dataset-path: /nowhere"),
        ("--dataset-path x", "needs --dataset sharegpt or lines"),
        ("--tokenizer /nowhere", "--tokenizer: /nowhere"),
        ("--tokenizer no/where", "--tokenizer: no/where is no file, and its tokenizer is not in the cache"),
        ("--num-prefixes 2", "needs --prefix-len"),
        ("--dataset lines --prefix-len 2", "is for --dataset random"),
        ("--dataset lines --turns 2", "--turns is for"),
        ("--save-requests", "--save-requests needs --save"),
        ("--save /nowhere/file", "--save /nowhere/file cannot be written"),
        ("--request-rate 1e-320", "--request-rate"),
        ("--ramp-up exponential --ramp-up-from 1 --ramp-up-to 1e-300", "--ramp-up-to"),
        ("--percentiles 50,50", "each of them once"),
        ("--base-url http://a..b", "expected the URL of a server"),
        ("--header Content-Length=3", "is not a header that can be sent"),
        ("--model \udcff", "is not the name of a model"),
        ("--insecure --ca-file /x", "--ca-file has no say"),
        ("--plots /proc/none", "--plots"),
        ("--ca-file /nowhere", "--ca-file: /nowhere"),
        ("--nonsense 1", "unknown option --nonsense"),
    ],
)
def test_a_wrong_option_of_serve_is_named_in_one_line(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["bench", "serve", *words.split()])
    except SystemExit as ended:
        code = int(str(ended.code))
    err = capsys.readouterr().err
    assert code == 2
    assert said in err
    assert err.startswith("catenary bench serve: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--model x -- --nonsense 1", "unknown option --nonsense"),
        ("-- --model x", "--model after --"),
        ("--save /nowhere/x", "--save /nowhere/x cannot be written"),
        ("-- --max-num-seqs", "--max-num-seqs"),
        ("-- --max-num-seqs 0", "--max-num-seqs '0'"),
        ("--request-rate 1", "unknown option --request-rate"),
        ("--dataset lines", "--dataset lines needs --dataset-path"),
        ("--input-len 0", "--input-len"),
    ],
)
@pytest.mark.usefixtures("kept_logging")
def test_a_wrong_option_of_throughput_is_named_in_one_line(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["bench", "throughput", *words.split()])
    except SystemExit as ended:
        code = int(str(ended.code))
    err = capsys.readouterr().err
    assert code == 2
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("words", [[], ["nonsense"]])
def test_bench_has_two_commands(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == 2
    assert "serve" in capsys.readouterr().err
    assert main(["bench", "--help"]) == 0
    assert "throughput" in capsys.readouterr().out


def test_the_load_tool_knows_no_service_and_no_torch() -> None:
    code = "import sys, catenary_apps.load, catenary_apps.bench.serve; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    names = {name.split(".")[0] for name in loaded.split()}
    assert not names & {"torch", "transformers", "grpc", "services", "gateway", "matplotlib", "numpy"}


def test_what_is_missing_is_named_in_one_line() -> None:
    code = (
        "import sys; sys.modules['httptools'] = None; from catenary_apps.cli.main import main; "
        "sys.exit(main(['bench', 'serve']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert (
        done.stderr
        == "catenary bench: httptools is missing: pip install '.[bench]' in a clone of the repository\n"
    )


def test_a_ramp_and_a_duration_are_an_open_loop(origin: Origin, capsys: pytest.CaptureFixture[str]) -> None:
    ramp = ["--ramp-up", "exponential", "--ramp-up-from", "50", "--ramp-up-to", "500"]
    assert bench_serve(origin, *ramp, "--duration-s", "0.5") == 0
    out = capsys.readouterr().out
    assert "latencies count from when a request was due" in out
    assert "the prompts were used up before --duration-s was over" in out
    assert "started late by" in out


def test_files_hold_what_is_asked(origin: Origin, tmp_path: Path) -> None:
    tokenizer = write_tiny_model(tmp_path / "tiny")
    said = [{"from": "human", "value": "what is it then"}, {"from": "gpt", "value": "nothing at all"}]
    shared = tmp_path / "sharegpt.json"
    shared.write_text(json.dumps([{"conversations": said}] * 2))
    words = ["--warmup", "0", "--dataset-path", str(shared), "--endpoint", "chat"]
    serve = ["bench", "serve", "--base-url", origin.address]
    assert main([*serve, "--dataset", "sharegpt", "--tokenizer", str(tokenizer), *words]) == 0
    assert [body["messages"][0]["content"] for body in origin.bodies] == ["what is it then"] * 2
    assert origin.bodies[0]["max_tokens"] == TokenizerText.load(tokenizer).count("nothing at all")
    origin.exchanges.clear()
    lines = tmp_path / "lines"
    lines.write_text('{"prompt": [5, 6]}\n{"prompt": "text", "output_tokens": 3}\n')
    assert main([*serve, "--dataset", "lines", "--dataset-path", str(lines), "--warmup", "0"]) == 0
    assert [(body["prompt"], body["max_tokens"]) for body in origin.bodies] == [([5, 6], 128), ("text", 3)]


def test_plots_name_what_they_lack(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", "serve", "--plots", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        "catenary bench serve: --plots: matplotlib is missing: pip install '.[bench]' in a clone of the "
        "repository\n"
    )


def test_the_numbers_are_shown_even_if_they_cannot_be_kept(
    origin: Origin, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench_serve(origin, "--save", "/dev/full") == 1
    captured = capsys.readouterr()
    assert "3 answered" in captured.out
    assert "cannot be written" in captured.err
