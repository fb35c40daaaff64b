"""The log-probabilities of one prompt, put together from what the chunks of its prefill make known.

Pure. A checkpoint in the middle of a prefill loses nothing: the parts that are here stay, and what
the next row computes again of them is dropped.
"""

from callboard.messages.errors import RequestError
from callboard.messages.logprobs import PromptLogprobs

MAX_BYTES = 32 * 2**20
"""Of the scores of one prompt, which travel in one frame, and others' news beside them."""

_BYTES = 4  # of an id and of a log-probability


def check_size(num_top: int | None, num_prompt: int) -> None:
    """Raise RequestError where a prompt has more scores than can be sent."""
    if num_top is None:
        return
    most = MAX_BYTES // (_BYTES * (1 + 2 * num_top))
    if num_prompt > most:
        raise RequestError(
            f"{num_prompt} prompt tokens with {num_top} alternatives each are more scores than fit "
            "into an answer",
            field="prompt_logprobs",
            allowed=f"prompts of at most {most} tokens with so many",
        )


class PromptScores:
    """Takes parts in order and hands the whole over, once."""

    def __init__(self, num_top: int | None, num_prompt: int) -> None:
        """`num_top` None: none were asked for, and nothing is ever handed over."""
        self._wanted = num_top is not None
        self._num_top = num_top or 0
        self._parts: list[PromptLogprobs] = []
        self._next = 1  # index in the prompt of the next token to come; token 0 has none before it
        self._end = num_prompt

    @property
    def missing(self) -> bool:
        """Whether a row of this prompt has to compute some of them."""
        return self._wanted and self._next < self._end

    @property
    def to_ask(self) -> int:
        """What to ask a row for: see `RowSampling.prompt_logprobs`."""
        return self._num_top if self.missing else -1

    def restart(self) -> None:
        """Begin anew, unless they were handed over: other weights score all of the prompt."""
        self._parts.clear()
        self._next = 1

    def take(self, part: PromptLogprobs) -> None:
        """Add a part, or as much of it as is new."""
        skip = self._next - part.start
        assert skip >= 0, f"prompt log-probs from {part.start} on, and {self._next} is next"
        news = _behind(part, skip)
        if news.logprobs:
            self._parts.append(news)
            self._next += len(news.logprobs) // _BYTES

    def hand_over(self) -> PromptLogprobs | None:
        """Return them all; None when they are not complete, not asked for or handed over before."""
        if self.missing or not self._wanted:
            return None
        parts, self._parts, self._wanted = self._parts, [], False
        return PromptLogprobs(
            start=1,
            logprobs=b"".join(part.logprobs for part in parts),
            num_top=parts[0].num_top if parts else self._num_top,
            top_ids=b"".join(part.top_ids for part in parts),
            top_logprobs=b"".join(part.top_logprobs for part in parts),
        )


def _behind(part: PromptLogprobs, skip: int) -> PromptLogprobs:
    """Return a part without its first `skip` tokens."""
    line = skip * part.num_top * _BYTES
    return PromptLogprobs(
        start=part.start + skip,
        logprobs=part.logprobs[skip * _BYTES :],
        num_top=part.num_top,
        top_ids=part.top_ids[line:],
        top_logprobs=part.top_logprobs[line:],
    )
