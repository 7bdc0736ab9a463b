"""Options of `vllm bench serve` that have another name, or another way, in `catenary bench serve`."""

from __future__ import annotations

from collections.abc import Mapping

_EXTRA = "--extra-body"

NAMES: Mapping[str, str] = {
    "--backend": "--endpoint completions or chat",
    "--host": "--base-url",
    "--port": "--base-url",
    "--served-model-name": "--model, by its name at the server",
    "--dataset-name": "--dataset",
    "--random-input-len": "--input-len",
    "--random-output-len": "--output-len",
    "--random-range-ratio": "--input-len and --output-len ratio:N:R",
    "--random-prefix-len": "--prefix-len",
    "--prefix-repetition-prefix-len": "--prefix-len",
    "--prefix-repetition-suffix-len": "--input-len",
    "--prefix-repetition-num-prefixes": "--num-prefixes",
    "--prefix-repetition-output-len": "--output-len",
    "--sharegpt-output-len": "--output-len",
    "--custom-output-len": "--output-len",
    "--num-warmups": "--warmup",
    "--ready-check-timeout-sec": "--ready-timeout-s",
    "--ramp-up-strategy": "--ramp-up",
    "--ramp-up-start-rps": "--ramp-up-from",
    "--ramp-up-end-rps": "--ramp-up-to",
    "--top-p": _EXTRA,
    "--top-k": _EXTRA,
    "--min-p": _EXTRA,
    "--frequency-penalty": _EXTRA,
    "--presence-penalty": _EXTRA,
    "--repetition-penalty": _EXTRA,
    "--logprobs": _EXTRA,
    "--use-beam-search": _EXTRA,
    "--metric-percentiles": "--percentiles",
    "--percentile-metrics": "--percentiles, of all metrics",
    "--save-result": "--save",
    "--result-dir": "--save DIRECTORY",
    "--result-filename": "--save FILE",
    "--append-result": "--save DIRECTORY, one file a run",
    "--save-detailed": "--save-requests",
    "--label": "--metadata label=NAME",
    "--plot-timeline": "--plots",
    "--disable-tqdm": "--no-progress",
}
