"""Facts about Gaudi that need no card: the vendor's software releases, and rules by model.

From the vendor's support matrices, from release notes of its vLLM plugin and from its start scripts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

Version = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Release:
    """A release of the Gaudi software: the torch that its updates bring, and the Pythons of its images."""

    torches: tuple[Version, ...]
    pythons: tuple[Version, ...]


RELEASES: dict[Version, Release] = {
    (1, 22): Release(((2, 7),), ((3, 10), (3, 11), (3, 12))),
    (1, 23): Release(((2, 9),), ((3, 10), (3, 11), (3, 12))),
    (1, 24): Release(((2, 10), (2, 11)), ((3, 10), (3, 11), (3, 12))),
}

PYTHONS: tuple[Version, ...] = ((3, 11), (3, 12))
"""Pythons that run the engines of this version, as in pyproject.toml."""

PLUGIN = "habana-torch-plugin"
"""The package whose version is the software's."""

IMAGE = "gaudi-docker/1.24.0/ubuntu24.04/habanalabs/pytorch-installer-2.10.0"
"""An image of the vendor's registry that fits."""


def supported() -> str:
    """Return the releases and Pythons, for a message."""
    return f"Habana software {_listed(tuple(RELEASES))} with Python {_listed(PYTHONS)}"


def take_image() -> str:
    """Return advice on images for a message."""
    return f"take one of the vendor's images of these, such as {IMAGE}, and a driver of the same release"


def too_old(software: str) -> str | None:
    """Return why engines refuse software of this version: one line, with an image to take. None if new
    enough."""
    numbers = re.match(r"(\d+)\.(\d+)", software)
    if numbers is None or (int(numbers[1]), int(numbers[2])) >= min(RELEASES):
        return None
    return f"Habana software {software} is too old: engines run on {supported()}; {take_image()}"


def _listed(versions: tuple[Version, ...]) -> str:
    *first, last = (f"{major}.{minor}" for major, minor in versions)
    return f"{', '.join(first)} or {last}"


# Families, by the beginning of config.json's model_type, whose scores are too large for the eight bits that
# bfloat16 has: the plugin computes their softmax in float32, without the kernel that rounds block maxima.
_FLOAT32_FAMILIES = ("qwen2",)
# Models for which start_gaudi_vllm_server.sh sets VLLM_FP32_SOFTMAX, by a part of their names.
_FLOAT32_NAMES = ("qwen2-7b", "qwen2.5-7b", "r1-distill-qwen-7b")


def needs_float32_scores(model_type: str) -> bool:
    """Whether attention of a model of this type has to compute its scores and their softmax in float32."""
    return model_type.startswith(_FLOAT32_FAMILIES)


def named_for_float32_scores(name: str) -> bool:
    """Decide by a model's name, where its config.json has not been read."""
    return any(part in name.lower() for part in _FLOAT32_NAMES)
