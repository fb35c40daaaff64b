import pytest
import torch

from callboard.gpu.device import release_memory, resident_bytes
from callboard.gpu.kv_cache import KVCache
from tests.gpu import own_process

CPU = torch.device("cpu")


def make_cache(num_blocks: int = 3) -> KVCache:
    return KVCache(
        num_layers=2,
        num_blocks=num_blocks,
        block_tokens=4,
        num_kv_heads=2,
        head_dim=8,
        dtype=torch.float16,
        device=CPU,
    )


def test_each_layer_has_keys_and_values_of_its_own() -> None:
    cache = make_cache()
    k_cache, v_cache = cache.layer(0)
    k_cache.fill_(1)
    v_cache.fill_(2)

    assert k_cache.shape == v_cache.shape == (3, 4, 2, 8)
    assert k_cache.dtype == torch.float16
    assert (k_cache == 1).all()
    assert not any(half.any() for half in cache.layer(1))


def test_its_bytes_are_those_of_all_blocks_until_it_is_freed() -> None:
    cache = make_cache()

    before = (cache.allocated, cache.bytes)
    cache.free()

    assert before == (True, 3 * (2 * 2 * 4 * 2 * 8 * 2))
    assert (cache.allocated, cache.bytes) == (False, 0)
    with pytest.raises(RuntimeError, match="freed"):
        cache.layer(0)


def test_freeing_twice_is_harmless() -> None:
    cache = make_cache()

    cache.free()
    cache.free()

    assert not cache.allocated


def test_its_memory_is_resident_at_once_and_goes_back_to_the_system() -> None:
    own_process.run(take_and_free)


def take_and_free() -> None:
    release_memory(CPU)
    before = resident_bytes(CPU)

    cache = make_cache(num_blocks=2**16)
    size = cache.bytes
    allocated = resident_bytes(CPU)
    cache.free()
    release_memory(CPU)

    assert size == 32 * 2**20
    assert allocated - before >= 0.9 * size
    assert allocated - resident_bytes(CPU) >= 0.9 * size
