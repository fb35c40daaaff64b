"""The decoder against transformers, on tiny random models of each supported kind.

Every model is saved by transformers and loaded by `load_model`, so both are tested at once.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from callboard.gpu.attention.base import build_metadata
from callboard.gpu.kv_cache import KVCache
from callboard.gpu.loading import LoadedModel, load_model

BLOCK_TOKENS = 4
NUM_BLOCKS = 64
SHAPE: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # large enough for every part to show in the logits
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 2.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 4.0,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with wide heads": ("Llama", {"head_dim": 20}),
    "llama3 scaling": ("Llama", {"rope_parameters": LLAMA3}),
    "linear scaling": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}},
    ),
    "yarn scaling": ("Llama", {"rope_parameters": YARN}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
}


def save_model(kind: str, folder: Path) -> Any:
    """Make a random model as transformers has it, with no weight left at 0 or 1, and save it."""
    family, options = KINDS[kind]
    config = getattr(transformers, f"{family}Config")(**SHAPE, **options)
    torch.manual_seed(7)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    model.save_pretrained(folder)
    return model


class Batch:
    """Runs ragged steps over sequences that have their blocks in no order."""

    def __init__(self, model: LoadedModel, sequences: list[Tensor]) -> None:
        config = model.config.decoder
        self._model = model
        self._sequences = sequences
        self._done = [0] * len(sequences)
        self._cache = KVCache(
            num_layers=config.num_layers,
            num_blocks=NUM_BLOCKS,
            block_tokens=BLOCK_TOKENS,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=torch.float32,
            device="cpu",
        )
        blocks = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(3))
        self._blocks = blocks.view(len(sequences), -1).numpy()

    def step(self, feeds: list[tuple[int, int]]) -> list[Tensor]:
        """Feed (sequence, number of its next tokens), decodes first; return each token's logits."""
        rows = [row for row, _ in feeds]
        counts = [count for _, count in feeds]
        tokens = [
            self._sequences[row][self._done[row] : self._done[row] + count] for row, count in feeds
        ]
        for row, count in feeds:
            self._done[row] += count
        metadata = build_metadata(
            counts,
            [self._done[row] for row in rows],
            self._blocks[rows],
            block_tokens=BLOCK_TOKENS,
        )
        hidden = self._model.decoder.forward(torch.cat(tokens), metadata, self._cache)
        return list(self._model.decoder.logits(hidden).split_with_sizes(counts))


@pytest.fixture(autouse=True)
def _inference_mode() -> Any:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same model loaded by us, and as a function from tokens to logits by transformers."""
    folder = tmp_path_factory.mktemp("model")
    reference = save_model(request.param, folder)
    loaded = load_model(folder, device=torch.device("cpu"), dtype=torch.float32)

    def expected_logits(tokens: Tensor) -> Tensor:
        logits: Tensor = reference(tokens[None]).logits[0]
        return logits

    return loaded, expected_logits


Pair = tuple[LoadedModel, Callable[[Tensor], Tensor]]


def some_tokens(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(SHAPE["vocab_size"], (count,), generator=generator)


def assert_close(logits: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_a_prefill_gives_the_logits_of_transformers(pair: Pair) -> None:
    model, expected_logits = pair
    tokens = some_tokens(150, seed=0)

    (logits,) = Batch(model, [tokens]).step([(0, 150)])

    assert_close(logits, expected_logits(tokens))


def test_chunks_and_decodes_give_the_logits_of_one_prefill(pair: Pair) -> None:
    model, expected_logits = pair
    tokens = some_tokens(23, seed=1)
    batch = Batch(model, [tokens])

    logits = [batch.step([(0, count)])[0] for count in (3, 8, 1, 7, 1, 1, 1, 1)]

    assert_close(torch.cat(logits), expected_logits(tokens))


def test_prefills_chunks_and_decodes_share_a_call(pair: Pair) -> None:
    model, expected_logits = pair
    sequences = [some_tokens(count, seed=count) for count in (12, 30, 9, 21)]
    batch = Batch(model, sequences)
    got: list[list[Tensor]] = [[], [], [], []]

    for feeds in (
        [(0, 11), (1, 7)],
        [(0, 1), (1, 9), (2, 8)],
        [(2, 1), (1, 14), (3, 21)],
    ):
        for (row, _), logits in zip(feeds, batch.step(feeds), strict=True):
            got[row].append(logits)

    for sequence, logits_of_steps in zip(sequences, got, strict=True):
        assert_close(torch.cat(logits_of_steps), expected_logits(sequence))


def test_logits_are_for_the_rows_asked_for_in_float32(pair: Pair) -> None:
    model, _ = pair
    hidden = torch.randn(5, model.config.decoder.hidden_size)

    logits = model.decoder.logits(hidden)

    assert logits.dtype == torch.float32
    assert logits.shape == (5, SHAPE["vocab_size"])
    assert_close(model.decoder.logits(hidden[3:4]), logits[3:4])


def test_bfloat16_is_close_to_float32(tmp_path: Path) -> None:
    reference = save_model("llama", tmp_path)
    model = load_model(tmp_path, device=torch.device("cpu"), dtype=torch.bfloat16)
    tokens = some_tokens(20, seed=2)

    (logits,) = Batch(model, [tokens]).step([(0, 20)])

    expected = reference(tokens[None]).logits[0]
    assert logits.dtype == torch.float32
    assert (logits - expected).abs().max() < 0.05 * expected.abs().max()
