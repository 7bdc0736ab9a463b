"""The tables of what moves over from vLLM: complete, without doubt, and true to the tests that they name."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from catenary.config import ConfigError
from catenary_apps.migration.launch import Launch
from catenary_apps.migration.letters import R1_SCRIPT, SCRIPT
from catenary_apps.migration.serve import SERVE_OPTIONS, parse_serve
from catenary_apps.up.launching import run_gaudi_start, run_vllm_serve
from catenary_apps.up.run import run_up
from services.engine.config import EngineConfig
from services.engine.vllm_variables import VARIABLES, Row, Status, load_moved, row_of, translate
from tests.support.repository import ROOT

OPTIONS = tuple(option.row for option in SERVE_OPTIONS)
LETTERS = tuple(entry.row for entry in (*SCRIPT, *R1_SCRIPT))
# Variables that a user of vLLM on Gaudi finds in its documentation or its scripts: all have a row.
DOCUMENTED = """
VLLM_GRAPH_RESERVED_MEM VLLM_GRAPH_PROMPT_RATIO VLLM_GRAPH_PROMPT_STRATEGY VLLM_GRAPH_DECODE_STRATEGY
VLLM_SKIP_WARMUP VLLM_FULL_WARMUP VLLM_BUCKETING_STRATEGY VLLM_EXPONENTIAL_BUCKETING VLLM_ENABLE_BUCKETING
VLLM_BUCKETING_FROM_FILE VLLM_PROMPT_BS_BUCKET_MAX VLLM_PROMPT_SEQ_BUCKET_MIN VLLM_PROMPT_QUERY_BUCKET_STEP
VLLM_PROMPT_CTX_BUCKET_PAD_MAX VLLM_DECODE_BS_BUCKET_PAD_PERCENT VLLM_DECODE_BLOCK_BUCKET_MAX
VLLM_DECODE_BLOCK_BUCKET_LIMIT VLLM_CONTIGUOUS_PA VLLM_PROFILER_ENABLED VLLM_PROFILE_FILE VLLM_PT_PROFILE
VLLM_DELAYED_SAMPLING VLLM_ENGINE_ITERATION_TIMEOUT_S VLLM_RPC_TIMEOUT VLLM_USE_MODELSCOPE VLLM_API_KEY
VLLM_LOGGING_LEVEL VLLM_USE_V1 VLLM_PROMPT_USE_FUSEDSDPA VLLM_PA_SOFTMAX_IMPL VLLM_MOE_CHUNK VLLM_COMPACT_GDN
VLLM_ROW_PARALLEL_CHUNKS VLLM_MULTIMODAL_BUCKETS VLLM_SCALE_ADJUSTMENT VLLM_HPU_FORCE_CHANNEL_FP8
VLLM_HPU_NIXL_STAGING_SLOTS VLLM_DEVELOPER_MODE VLLM_WORKER_MULTIPROC_METHOD VLLM_T_COMPILE_DYNAMIC_SHAPES
VLLM_GC_THR_MULTIPLIER VLLM_CONFIG_HIDDEN_LAYERS VLLM_T_COMPILE_FULLGRAPH PT_HPU_RECIPE_CACHE_CONFIG
VLLM_HPU_LOG_STEP_GRAPH_COMPILATION_ALL VLLM_HPU_LOG_STEP_CPU_FALLBACKS VLLM_ALLOW_LONG_MAX_MODEL_LEN
VLLM_FUSEDSDPA_SLIDE_THLD VLLM_WEIGHT_LOAD_FORCE_SYNC VLLM_HANDLE_TOPK_DUPLICATES VLLM_DEFRAG_THRESHOLD
PT_HPU_LAZY_MODE PT_HPU_ENABLE_LAZY_COLLECTIVES PT_HPU_WEIGHT_SHARING PT_HPUGRAPH_DISABLE_TENSOR_CACHE
PT_HPU_METRICS_GC_DETAILS PT_HPU_SDPA_QKV_SLICE_MODE_FWD PT_HPU_SDPA_BC_FACTOR PT_HPU_POOL_STRATEGY
RUNTIME_SCALE_PATCHING QUANT_CONFIG HABANA_VISIBLE_MODULES HLS_MODULE_ID HABANA_PROFILE MAX_EXPERTS_PER_SLICE
HCCL_COMM_ID LIBFABRIC_ROOT
HF_HOME HF_ENDPOINT HF_TOKEN HF_HUB_OFFLINE MODELSCOPE_CACHE MODELSCOPE_DOMAIN MODELSCOPE_API_TOKEN
"""


def functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("row", [*VARIABLES, *OPTIONS, *LETTERS], ids=lambda row: row.names[0])
def test_supported_row_names_a_test_that_exists(row: Row) -> None:
    assert row.names
    assert row.note
    if row.status in (Status.SUPPORTED, Status.PASSED_ON):
        path, _, function = row.test.partition("::")
        assert function in functions(ROOT / path)
    else:
        assert not row.test


@pytest.mark.parametrize("name", DOCUMENTED.split())
def test_documented_variable_has_a_row(name: str) -> None:
    assert row_of(name) is not None


def test_each_name_is_in_one_row() -> None:
    for rows in (VARIABLES, OPTIONS):
        names = [name for row in rows for name in row.names]
        assert len(names) == len(set(names))


def test_all_letters_of_the_scripts_are_there() -> None:
    assert {entry.letter for entry in SCRIPT} == set("wtmadqxpbguelcsf") | set("ionz")
    assert {entry.letter for entry in R1_SCRIPT} == set("wuplbcmsq") | {"t"}


@pytest.mark.parametrize(
    "name",
    [
        name.replace("*", "ANY")
        for row in VARIABLES
        if not row.status.has_effect and row.rule is None
        for name in row.names
    ],
)
def test_variable_without_effect_is_one_warning_line_without_its_value(name: str) -> None:
    translation = translate({name: "some-value"})
    assert not translation.options
    (line,) = translation.warnings
    assert line.startswith(f"{name} has no effect")
    assert "some-value" not in line
    assert "\n" not in line


@pytest.mark.parametrize(
    "name",
    [
        "VLLM_PROMPT_USE_FLEX_ATTENTION",
        "VLLM_IMAGE_FETCH_TIMEOUT",
        "VLLM_VIDEO_FETCH_TIMEOUT",
        "VLLM_AUDIO_FETCH_TIMEOUT",
        "VLLM_HPU_CONVERT_TO_FP8UZ",
        "VLLM_DISABLE_MARK_SCALES_AS_CONST",
        "VLLM_FULL_WARMUP",
    ],
)
def test_a_variable_of_the_handbooks_without_its_whole_effect_is_named(name: str) -> None:
    (line,) = translate({name: "1"}).warnings
    assert line.startswith(name)


@pytest.mark.parametrize(
    "words",
    [
        "--num-scheduler-steps 8",
        "--limit-mm-per-prompt image=4",
        '--mm_processor_kwargs {"num_crops":4}',
        "--use-padding-aware-scheduling",
        "--swap-space 16",
        "--distributed_executor_backend mp",
        "--disable-log-requests",
        "--trust-remote-code",
    ],
)
def test_an_option_of_the_handbooks_without_effect_is_named(words: str) -> None:
    launch = Launch()
    parse_serve(["m", *words.split()], launch)
    (line,) = launch.warnings
    assert line.startswith(f"{words.split()[0].replace('_', '-')} has no effect: ")


def test_unknown_variables_are_named_with_the_nearest_known_one() -> None:
    environment = {"VLLM_GRAPH_RESERVED_MEN": "secret", "PT_HPU_NEW": "1", "PATH": "/bin", "VLLM_ODD": ""}
    assert translate(environment).warnings == (
        "PT_HPU_NEW is not known here and has no effect",
        "VLLM_GRAPH_RESERVED_MEN is not known here and has no effect (did you mean VLLM_GRAPH_RESERVED_MEM?)",
    )


def test_nothing_set_is_nothing_said() -> None:
    translation = translate({"PATH": "/bin", "HOME": "/root", "CATENARY_ENGINE_MODEL": "m"})
    assert (dict(translation.options), translation.warnings) == ({}, ())


@pytest.mark.parametrize(
    ("name", "on", "off"),
    [
        ("QUANT_CONFIG", "/calibration/maxabs_quant_g3.json", ""),
        ("VLLM_REQUANT_FP8_INC", "true", "false"),
        ("VLLM_DYNAMIC_KV_QUANT", "1", "0"),
        ("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "True", "False"),
        ("VLLM_EP_SIZE", "8", "1"),
        ("VLLM_DP_SIZE", "2", "1"),
    ],
)
def test_what_would_switch_on_what_is_not_done_is_refused(
    name: str, on: str, off: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        translate({name: on})
    assert str(caught.value).startswith(f"{name}: ")
    assert "not done yet; unset it to " in str(caught.value)
    assert on not in str(caught.value).split()
    assert (dict(translate({name: off}).options), translate({name: off}).warnings) == ({}, ())
    # At every front door, and before anything is started.
    monkeypatch.setenv(name, on)
    doors = {
        "catenary gaudi-start": lambda: run_gaudi_start(["-w", "m", "--dry-run"]),
        "catenary vllm-serve": lambda: run_vllm_serve(["m", "--dry-run"]),
        "catenary up": lambda: run_up([]),
        "services.engine": lambda: load_moved(EngineConfig, [], prog="services.engine"),
    }
    for program, start in doors.items():
        try:
            code: object = start()
        except SystemExit as end:
            code = end.code
        assert code == 2
        assert capsys.readouterr().err == f"{program}: {caught.value}\n"
