"""The how-to on operation says that RESUME reads new weights; so it does."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from callboard import Engine, open_engine
from callboard.gpu.loading.checkpoint import expected_shapes
from callboard.gpu.loading.loader import read_config

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}


def write_weights(folder: Path, seed: int) -> None:
    torch.manual_seed(seed)
    shapes = expected_shapes(read_config(folder).decoder)
    save_file({name: torch.randn(shape) for name, shape in shapes}, folder / "model.safetensors")


async def generate(engine: Engine) -> list[int]:
    [answer] = await engine.generate([[1, 2, 3]], temperature=0.0, max_tokens=8)
    return answer.token_ids


async def test_a_tree_that_resumes_computes_with_the_weights_that_are_there_then(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    write_weights(tmp_path, seed=1)
    async with open_engine(model=str(tmp_path), kv_cache_gb=0.01) as engine:
        before = await generate(engine)
        await engine.suspend(kv="drop", weights="discard")
        write_weights(tmp_path, seed=2)
        await engine.resume()
        after = await generate(engine)

    async with open_engine(model=str(tmp_path), kv_cache_gb=0.01) as engine:
        assert before != after == await generate(engine)
