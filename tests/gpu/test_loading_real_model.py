"""The default model, SmolLM2-135M-Instruct, against outputs of transformers in float32.

`default_model` (tests/conftest.py) is the path of its GGUF file.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from callboard.gpu.attention.base import build_metadata
from callboard.gpu.kv_cache import KVCache
from callboard.gpu.loading import LoadedModel, load_model, read_config

CPU = torch.device("cpu")
BLOCK_TOKENS = 16
NUM_BLOCKS = 8
REFERENCE = Path(__file__).parent.parent / "reference" / "smollm2-135m-greedy.jsonl"
MAX_LOG_PROB_ERROR = 2e-4


@pytest.fixture(scope="module")
def model(default_model: Path) -> LoadedModel:
    return load_model(default_model, device=CPU, dtype=torch.float32)


def reference(name: str) -> dict[str, Any]:
    entries = map(json.loads, REFERENCE.read_text().splitlines())
    return next(entry for entry in entries if entry["name"] == name)


class Sequence:
    """Feeds one sequence to the model, a few tokens at a time, its blocks in no order."""

    def __init__(self, model: LoadedModel) -> None:
        config = model.config.decoder
        self._decoder = model.decoder
        self._length = 0
        blocks = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(0))
        self._blocks = [blocks.tolist()]
        self._cache = KVCache(
            num_layers=config.num_layers,
            num_blocks=NUM_BLOCKS,
            block_tokens=BLOCK_TOKENS,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=torch.float32,
            device=CPU,
        )

    def feed(self, tokens: list[int]) -> Tensor:
        """Return the log-probabilities of what follows each token."""
        self._length += len(tokens)
        metadata = build_metadata(
            [len(tokens)], [self._length], self._blocks, block_tokens=BLOCK_TOKENS
        )
        with torch.inference_mode():
            hidden = self._decoder.forward(torch.tensor(tokens), metadata, self._cache)
            return self._decoder.logits(hidden).log_softmax(-1)


def test_its_configuration_is_read(default_model: Path) -> None:
    config = read_config(default_model)

    assert (config.format, config.architecture) == ("gguf", "llama")
    assert config.eos_token_ids == (2,)
    assert (config.decoder.num_layers, config.decoder.hidden_size) == (30, 576)
    assert (config.decoder.num_heads, config.decoder.num_kv_heads) == (9, 3)
    assert config.decoder.tie_word_embeddings


def test_all_its_tensors_are_used(model: LoadedModel) -> None:
    assert model.unused_tensors == ()
    assert model.weights_bytes == 4 * 134_515_008


@pytest.mark.parametrize("name", ["completion", "chat"])
def test_greedy_tokens_and_their_log_probs_are_those_of_transformers(
    name: str, model: LoadedModel
) -> None:
    expected = reference(name)
    sequence = Sequence(model)
    log_probs = sequence.feed(expected["prompt_ids"])[-1]
    output_ids, output_log_probs = [], []

    for _ in expected["output_ids"]:
        output_ids.append(int(log_probs.argmax()))
        output_log_probs.append(float(log_probs.max()))
        log_probs = sequence.feed(output_ids[-1:])[-1]

    assert output_ids == expected["output_ids"]
    assert output_log_probs == pytest.approx(expected["logprobs"], abs=MAX_LOG_PROB_ERROR)


def test_log_probs_of_a_prompt_fed_in_chunks_are_those_of_transformers(model: LoadedModel) -> None:
    expected = reference("chat")
    sequence, prompt = Sequence(model), expected["prompt_ids"]

    log_probs = torch.cat([sequence.feed(prompt[i : i + 13]) for i in range(0, len(prompt), 13)])

    of_prompt = log_probs[:-1].gather(1, torch.tensor(prompt[1:])[:, None]).flatten().tolist()
    known = [value for value in expected["prompt_logprobs"] if value is not None]
    assert of_prompt == pytest.approx(known, abs=MAX_LOG_PROB_ERROR)
