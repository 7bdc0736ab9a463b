"""Counter-based random numbers: a draw is a function of (seed, position) and of nothing else.

There is no generator state, so a sequence that is replayed elsewhere, batched with others or preempted goes
on with the numbers that it would have had. Pure Python on purpose: an engine draws one number a row and step.
"""

from __future__ import annotations

import secrets

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_SAMPLE_DOMAIN = 0x5341_4D50_4C45_0001


def _mix(value: int) -> int:
    """Do one splitmix64 step: a bijection of 64-bit words; each input bit moves half of the output bits."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def derive_seed(seed: int, sample_index: int) -> int:
    """Return the seed of sample `sample_index` of a request with several choices (n > 1).

    Any seed is taken modulo 2**64. The result is an int64; different indexes of one seed never collide.
    """
    return _signed(_mix(_mix((seed & _MASK) ^ _SAMPLE_DOMAIN) ^ (sample_index & _MASK)))


def draw_seed() -> int:
    """Return a fresh int64 seed for a request that gave none."""
    return _signed(secrets.randbits(64))


def uniform(seed: int, position: int) -> float:
    """Return the draw in [0, 1) at an absolute position of a sequence, with 53 random bits.

    Args:
        seed: any integer, taken modulo 2**64.
        position: index in the sequence, prompt included, of the token that the draw decides.
    """
    return (_mix(_mix(seed & _MASK) ^ (position & _MASK)) >> 11) * 2.0**-53
