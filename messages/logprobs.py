"""Log-probabilities as they travel: of sampled tokens in their deltas, of prompt tokens in here."""

import msgspec

from callboard.messages.base import TokenIds

TopLogprobs = tuple[tuple[int, float], ...]
"""The likeliest tokens at one position with their log-probabilities, the likeliest first."""


class PromptLogprobs(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """Log-probabilities of prompt tokens `start`, `start + 1`, …, each given those before it.

    A prompt of P tokens has P - 1 of them: nothing precedes token 0. `logprobs` is packed float32,
    one a token. `top_ids` and `top_logprobs` are packed int32 and float32, for each token the
    `num_top` likeliest in its place, the likeliest first; empty where none were asked for.
    """

    start: int
    logprobs: bytes
    num_top: int = 0
    top_ids: TokenIds = b""
    top_logprobs: bytes = b""
