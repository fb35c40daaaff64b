"""How many bytes a KV block takes, how many blocks a budget holds, and sizes as text.

Pure arithmetic: nothing is allocated or asked of a device here.
"""

GIB = 2**30


def block_bytes(
    *, num_layers: int, block_tokens: int, num_kv_heads: int, head_dim: int, itemsize: int
) -> int:
    """Return the bytes of one KV block: keys and values of `block_tokens` tokens in all layers.

    `num_kv_heads` are those of this rank, `itemsize` is the bytes of one element. Raises ValueError
    when any of them is below 1.
    """
    factors = {
        "num_layers": num_layers,
        "block_tokens": block_tokens,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "itemsize": itemsize,
    }
    for name, value in factors.items():
        if value < 1:
            raise ValueError(f"{name} is {value}, and must be at least 1")
    return 2 * num_layers * block_tokens * num_kv_heads * head_dim * itemsize


def blocks_in(budget_gib: float, bytes_per_block: int) -> int:
    """Return how many whole blocks fit `budget_gib` GiB; 0 when not even one does."""
    return int(budget_gib * GIB) // bytes_per_block


def blocks_for(num_tokens: int, block_tokens: int) -> int:
    """Return how many blocks hold `num_tokens` tokens of one sequence."""
    return -(-num_tokens // block_tokens)


def format_bytes(num_bytes: int) -> str:
    """Return a size as text with three significant digits, in the unit that keeps it below 1000."""
    value = float(num_bytes)
    unit = "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 999.5:
            break
        value, unit = value / 1024, larger
    digits = f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"
    return f"{digits} {unit}"
