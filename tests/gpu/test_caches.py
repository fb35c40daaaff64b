import pytest
import torch

from callboard.gpu.cache_spec import CacheSpec, KeyValueShape, LatentShape, LayerKind, StateShape
from callboard.gpu.caches import Caches
from callboard.gpu.device import release_memory, resident_bytes
from callboard.messages.errors import ConfigError
from tests.gpu import own_process

CPU = torch.device("cpu")
HYBRID: tuple[LayerKind, ...] = ("attention", "state", "other", "state", "attention")


def make_caches(
    *,
    layers: tuple[LayerKind, ...] = HYBRID,
    attention: KeyValueShape | LatentShape | None = None,
    num_blocks: int = 3,
    block_tokens: int = 4,
    num_states: int = 2,
) -> Caches:
    state = StateShape(
        conv_shape=(3, 2), ssm_shape=(5,), conv_dtype=torch.float16, ssm_dtype=torch.float32
    )
    spec = CacheSpec(
        layers=layers,
        attention=attention or KeyValueShape(num_kv_heads=2, head_dim=8),
        dtype=torch.float32,
        state=state if "state" in layers else None,
    )
    return Caches(
        spec, num_blocks=num_blocks, block_tokens=block_tokens, num_states=num_states, device=CPU
    )


def make_latent_caches(block_tokens: int = 64) -> Caches:
    latent = LatentShape(kv_lora_rank=6, rope_head_dim=2)
    return make_caches(layers=("attention",) * 2, attention=latent, block_tokens=block_tokens)


def test_keys_and_values_are_appended_to_their_layer_and_read_back() -> None:
    caches = make_caches()
    k_TKH, v_TKH = torch.rand(3, 2, 8), torch.rand(3, 2, 8)

    caches.append(4, k_TKH, v_TKH, torch.tensor([4, 5, 11]))  # two in block 1, one in block 2

    k_cache, v_cache = caches.layer(4)
    assert k_cache.shape == v_cache.shape == (3, 4, 2, 8)
    assert torch.equal(k_cache[[1, 1, 2], [0, 1, 3]], k_TKH)
    assert torch.equal(v_cache[[1, 1, 2], [0, 1, 3]], v_TKH)
    assert k_cache.count_nonzero() == k_TKH.count_nonzero()
    assert not any(half.any() for half in caches.layer(0))


def test_latent_vectors_are_appended_to_their_layer_and_read_back() -> None:
    caches = make_latent_caches()
    latent_TW = torch.rand(2, 8)

    caches.append_latent(1, latent_TW, torch.tensor([64, 63]))

    assert caches.latent(1).shape == (3, 64, 8)
    assert torch.equal(caches.latent(1)[[1, 0], [0, 63]], latent_TW)
    assert not caches.latent(0).any()


def test_latent_vectors_are_kept_in_the_dtype_of_the_cache() -> None:
    caches = make_latent_caches()

    caches.append_latent(0, torch.ones(1, 8, dtype=torch.bfloat16), torch.tensor([0]))

    assert caches.latent(0).dtype == torch.float32
    assert caches.latent(0).sum() == 8


def test_latent_vectors_in_blocks_of_another_size_than_theirs_are_refused() -> None:
    with pytest.raises(ConfigError, match="must be 64"):
        make_latent_caches(block_tokens=128)


def test_each_state_layer_has_states_of_its_own() -> None:
    caches = make_caches()
    for value, layer in ((10, 1), (30, 3)):
        conv, ssm = caches.states(layer)
        conv.fill_(value)
        ssm.fill_(value + 10)

    conv, ssm = caches.states(1)
    assert (conv == 10).all()
    assert (ssm == 20).all()
    conv, ssm = caches.states(3)
    assert (conv == 30).all()
    assert (ssm == 40).all()
    assert conv.shape == (3, 3, 2)  # a slot more than rows: the dummy
    assert ssm.shape == (3, 5)


def test_a_slot_begins_anew_in_all_layers_and_alone() -> None:
    caches = make_caches()
    for layer in (1, 3):
        for part in caches.states(layer):
            part.fill_(7)

    caches.zero_states(1)

    for layer in (1, 3):
        for part in caches.states(layer):
            assert not part[1].any()
            assert (part[[0, 2]] == 7).all()


@pytest.mark.parametrize("layer", [1, 2])
def test_a_layer_that_is_none_of_attention_has_no_keys(layer: int) -> None:
    with pytest.raises(IndexError, match="is no attention layer"):
        make_caches().layer(layer)


def test_a_layer_that_keeps_something_else_is_named() -> None:
    with pytest.raises(IndexError, match="layer 4 of 5 is no state layer"):
        make_caches().states(4)
    with pytest.raises(IndexError, match="layer 0 keeps no recurrent state"):
        make_latent_caches().states(0)
    with pytest.raises(IndexError, match="layer 0 keeps latent vectors"):
        make_latent_caches().layer(0)
    with pytest.raises(IndexError, match="layer 0 keeps keys and values"):
        make_caches().latent(0)


def test_its_bytes_are_those_its_spec_works_out() -> None:
    caches = make_caches()
    keys_and_values = 3 * (2 * 2 * 4 * 2 * 8 * 4)
    states = 3 * (2 * (6 * 2 + 5 * 4))

    before = caches.bytes
    caches.free()

    assert before == keys_and_values + states
    assert caches.bytes == 0


def test_freed_caches_are_not_read() -> None:
    caches = make_caches()

    caches.free()

    with pytest.raises(RuntimeError, match="freed"):
        caches.layer(0)
    with pytest.raises(RuntimeError, match="freed"):
        caches.states(1)


def test_latent_vectors_and_states_are_resident_at_once_and_go_back_to_the_system() -> None:
    own_process.run(take_and_free)


def take_and_free() -> None:
    release_memory(CPU)
    before = resident_bytes(CPU)

    latent = LatentShape(kv_lora_rank=6, rope_head_dim=2)
    caches = make_caches(
        layers=("attention", "state"),
        attention=latent,
        num_blocks=2**13,
        block_tokens=64,
        num_states=2**19,
    )
    size = caches.bytes
    allocated = resident_bytes(CPU)
    caches.free()
    release_memory(CPU)

    assert size >= 32 * 2**20
    assert allocated - before >= 0.9 * size
    assert allocated - resident_bytes(CPU) >= 0.9 * size
