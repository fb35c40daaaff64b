import pytest
import torch

from callboard.gpu.cache_spec import CacheSpec, KeyValueShape, LatentShape, StateShape
from callboard.messages.errors import ConfigError

HEADS = KeyValueShape(num_kv_heads=2, head_dim=8)
LATENT = LatentShape(kv_lora_rank=512, rope_head_dim=64)
STATE = StateShape(
    conv_shape=(544, 4), ssm_shape=(8, 64, 16), conv_dtype=torch.float32, ssm_dtype=torch.float32
)


def test_only_attention_layers_take_part_in_a_block_and_only_state_layers_in_a_state() -> None:
    spec = CacheSpec(
        layers=("state", "other", "attention", "other"),
        attention=HEADS,
        dtype=torch.float32,
        state=STATE,
    )

    assert spec.block_bytes(128) == 16_384
    assert spec.state_bytes() == 41_472


def test_a_model_without_states_spends_nothing_on_them() -> None:
    spec = CacheSpec(layers=("attention",) * 4, attention=HEADS, dtype=torch.float32)

    assert spec.block_bytes(128) == 65_536
    assert spec.state_bytes() == 0


def test_the_parts_of_a_state_may_differ_in_precision() -> None:
    state = StateShape(
        conv_shape=(2, 3), ssm_shape=(5,), conv_dtype=torch.bfloat16, ssm_dtype=torch.float32
    )
    spec = CacheSpec(
        layers=("attention", "state"), attention=HEADS, dtype=torch.float32, state=state
    )

    assert spec.state_bytes() == 6 * 2 + 5 * 4


def test_a_latent_block_has_one_vector_a_token() -> None:
    spec = CacheSpec(layers=("attention",) * 3, attention=LATENT, dtype=torch.bfloat16)

    assert spec.block_bytes(64) == 2 * 3 * 64 * (512 + 64)


def test_latent_blocks_have_64_tokens_and_no_other_number() -> None:
    spec = CacheSpec(layers=("attention",), attention=LATENT, dtype=torch.bfloat16)

    with pytest.raises(ConfigError, match="block_tokens is 16, and must be 64"):
        spec.block_bytes(16)


def test_layers_are_counted_by_kind() -> None:
    spec = CacheSpec(
        layers=("state", "attention", "state", "attention"),
        attention=HEADS,
        dtype=torch.float32,
        state=STATE,
    )

    assert [spec.number(layer, "state") for layer in (0, 2)] == [0, 1]
    assert [spec.number(layer, "attention") for layer in (1, 3)] == [0, 1]


@pytest.mark.parametrize("layer", [-1, 0, 2])
def test_a_layer_of_another_kind_has_no_number(layer: int) -> None:
    spec = CacheSpec(layers=("other", "attention"), attention=HEADS, dtype=torch.float32)

    with pytest.raises(IndexError, match=f"layer {layer} of 2 is no attention layer"):
        spec.number(layer, "attention")


def test_a_model_without_attention_is_refused() -> None:
    with pytest.raises(ConfigError, match="none of the 2 layers is one of attention"):
        CacheSpec(layers=("state", "state"), attention=HEADS, dtype=torch.float32, state=STATE)


@pytest.mark.parametrize(
    ("kind", "state"), [("state", None), ("other", STATE)], ids=["no shape", "no layer"]
)
def test_state_layers_and_the_shape_of_a_state_come_together(
    kind: str, state: StateShape | None
) -> None:
    with pytest.raises(ConfigError, match="layers have a recurrent state, and its shape is"):
        CacheSpec(
            layers=("attention", kind),  # type: ignore[arg-type]  # one of the kinds
            attention=HEADS,
            dtype=torch.float32,
            state=state,
        )
