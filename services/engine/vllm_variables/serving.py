"""Variables of the HTTP server and of where models come from."""

from __future__ import annotations

from services.engine.vllm_variables.rows import Row, Status, Variables, equivalent, passed_on, unneeded

_HUBS = "tests/unit/engine/model/test_hubs.py::"


def _api_key(variables: Variables) -> None:
    if (text := variables.key("VLLM_API_KEY")) is not None:
        variables.give("api_key", text, "VLLM_API_KEY")


def _check_modelscope(variables: Variables) -> None:
    variables.boolean("VLLM_USE_MODELSCOPE")


ROWS = (
    Row(
        ("VLLM_API_KEY",),
        Status.SUPPORTED,
        "`--api-key` of `catenary up`; the gateway's processes alone get it; an empty one ends the start",
        _api_key,
        "tests/unit/catenary_apps/migration/test_up.py::test_api_key_reaches_the_gateway_alone",
    ),
    Row(
        ("VLLM_USE_MODELSCOPE",),
        Status.SUPPORTED,
        "true: a hub id names a model of ModelScope. Without it, `modelscope:GROUP/NAME` does",
        _check_modelscope,
        f"{_HUBS}test_vllm_use_modelscope_makes_ids_those_of_modelscope",
    ),
    Row(
        ("MODELSCOPE_DOMAIN",),
        Status.SUPPORTED,
        "host or URL of ModelScope or of a mirror",
        test=f"{_HUBS}test_model_is_fetched_from_modelscope",
    ),
    Row(
        ("MODELSCOPE_CACHE",),
        Status.SUPPORTED,
        "models of ModelScope are kept there, else in Catenary's cache",
        test=f"{_HUBS}test_modelscope_cache_names_the_directory",
    ),
    Row(
        ("MODELSCOPE_API_TOKEN",),
        Status.SUPPORTED,
        "sent to ModelScope, and to no host that it redirects to",
        test=f"{_HUBS}test_token_is_sent_to_modelscope_alone",
    ),
    passed_on(
        "mirror of the Hugging Face hub, read by huggingface_hub",
        f"{_HUBS}test_hf_endpoint_names_a_mirror",
        "HF_ENDPOINT",
    ),
    passed_on(
        "no access to a hub; ModelScope's too",
        f"{_HUBS}test_offline_looks_into_the_cache_only",
        "HF_HUB_OFFLINE",
        "TRANSFORMERS_OFFLINE",
    ),
    passed_on(
        "read by huggingface_hub",
        "tests/unit/catenary_apps/migration/test_up.py::test_variables_reach_the_engine_as_they_are",
        "HF_HOME",
        "HF_HUB_CACHE",
        "HF_TOKEN",
        "HF_TOKEN_PATH",
        "HF_HUB_*",
        "HUGGING_FACE_HUB_TOKEN",
    ),
    equivalent(
        "`--host` and `--port` of `catenary up`; a variable of this name is often Kubernetes' for a "
        "service named vllm",
        "VLLM_PORT",
        "VLLM_PORT_*",
        "VLLM_SERVICE_*",
    ),
    equivalent("`CATENARY_GATEWAY_KEEP_ALIVE_S`", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE"),
    unneeded(
        "no usage statistics are sent anywhere",
        "VLLM_NO_USAGE_STATS",
        "VLLM_DO_NOT_TRACK",
        "VLLM_USAGE_STATS_SERVER",
        "VLLM_USAGE_SOURCE",
    ),
    unneeded(
        "tokens become text in the gateway, always",
        "VLLM_DETOKENIZE_ON_OPENAI_SERVER",
    ),
    unneeded("there are no developer's endpoints", "VLLM_SERVER_DEV_MODE"),
    unneeded("addresses are options of each service", "VLLM_HOST_IP", "VLLM_LOOPBACK_IP"),
    equivalent(
        "`--cache-dir`, or CATENARY_CACHE", "VLLM_CACHE_ROOT", "VLLM_ASSETS_CACHE", "VLLM_CONFIG_ROOT"
    ),
)
