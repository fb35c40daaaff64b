"""Four fixed workloads of token ids: no two prompts share a prefix, and no output ends early.

W1  one request, 128 prompt tokens, 64 new ones: time to first token, inter-token latency
W2  16 at once, 32 to 256 prompt tokens, 64 new ones: output tokens a second
W3  64 at once, 32 to 256 prompt tokens, 16 to 128 new ones: output tokens a second
W4  one request, 2048 prompt tokens, 1 new one: prompt tokens a second
"""

import random

Work = list[tuple[list[int], int]]
"""Requests that are submitted together: prompt token ids, and the number of tokens to generate."""


def make() -> dict[str, Work]:
    """Return the workloads by name, the same on every call."""
    rng = random.Random(1234)

    def ids(count: int) -> list[int]:
        return [rng.randrange(1000, 48000) for _ in range(count)]

    return {
        "W1": [(ids(128), 64)],
        "W2": [(ids(rng.randint(32, 256)), 64) for _ in range(16)],
        "W3": [(ids(rng.randint(32, 256)), rng.randint(16, 128)) for _ in range(64)],
        "W4": [(ids(2048), 1)],
    }


def fresh(work: Work, repetition: int) -> Work:
    """Return the same work with other ids, so that no cached prefix can help a repetition."""
    shift = 7 * repetition + 1
    return [([(token + shift) % 47000 + 1000 for token in prompt], num) for prompt, num in work]


def within(work: Work, vocab_size: int) -> Work:
    """Return the work for a smaller vocabulary; one of 48,000 tokens or more leaves it as it is."""
    return [([token % vocab_size for token in prompt], num) for prompt, num in work]
