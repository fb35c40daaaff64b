"""What fits a device: how long a request may get, and which requests can never run. Pure."""

from callboard.gpu.memory import blocks_for
from callboard.messages.errors import OutOfBlocks, RequestError, SequenceOverflow
from callboard.messages.requests import RequestId
from callboard.messages.steps import DeviceReady


def room_for(device: DeviceReady, prompt_tokens: int) -> int:
    """Return how many tokens a request could generate at most behind such a prompt."""
    return min(device.max_model_len, _most_tokens(device)) - prompt_tokens


def check_fits(
    device: DeviceReady,
    prompt_tokens: int,
    max_tokens: int | None,
    *,
    delivered: int = 0,
    request_id: RequestId = "",
) -> int:
    """Return the request's max_tokens; raises RequestError when it can never run.

    That is a ContextOverflow, and no transient one, where it is too long for what there is.
    `delivered` is how many tokens it has generated already, in an earlier life.
    """
    longest = device.max_model_len - (max_tokens != 0)
    if prompt_tokens > longest:
        raise SequenceOverflow(
            f"the prompt has {prompt_tokens} tokens, and prompt and output together may have "
            f"{device.max_model_len}",
            request_id=request_id,
            field="prompt",
            allowed=f"1 to {longest} tokens",
        )
    wanted = max(1, room_for(device, prompt_tokens)) if max_tokens is None else max_tokens
    if prompt_tokens + wanted > device.max_model_len:
        raise SequenceOverflow(
            f"{prompt_tokens} prompt tokens and max_tokens {wanted} are together over the "
            f"context of {device.max_model_len}",
            request_id=request_id,
            field="max_tokens",
            allowed=f"1 to {device.max_model_len - prompt_tokens}",
        )
    needed = blocks_for(prompt_tokens + max(wanted, 1) - 1, device.block_tokens)
    if needed > device.num_blocks:
        raise OutOfBlocks(
            f"the request needs {needed} KV blocks of {device.block_tokens} tokens, and the "
            f"pool has {device.num_blocks}",
            request_id=request_id,
            transient=False,
            field="max_tokens",
            allowed=f"prompt and output within {_most_tokens(device)} tokens",
        )
    if delivered >= max(wanted, 1):
        raise RequestError(
            f"{delivered} tokens are delivered already, and max_tokens is {wanted}",
            field="delivered",
            allowed=f"at most {max(wanted, 1) - 1} tokens",
        )
    return wanted


def _most_tokens(device: DeviceReady) -> int:
    """Return how long a sequence may get: the last token sampled is never put into the cache."""
    return device.num_blocks * device.block_tokens + 1
