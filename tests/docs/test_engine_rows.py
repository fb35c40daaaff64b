"""The page of rows tells the truth: each item is there, with places and tests that exist."""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "engine-rows.md"

PLACE = re.compile(r"`(callboard[\w.]*):([\w.]+)(?:\((\w+)\))?`")
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
STATES = ("WAITS", "DROPPED")

ERRORS = """
    `ContextOverflowError` | `ContextOverflowError` "No Mamba slots available"
    `RequestOverflowError` | `TokenOverflowError` | `MaxSequenceLengthOverflowError`
    `BlockOverflowError` | `ActiveRequestCountOverflowError` | `TensorStateDeallocatedError`
    `ContextErrorFactory.serialize` | `ContextErrorFactory.deserialize` | `get_mem_size_str`
"""
CONSTANTS = "`DEFAULT_MAX_TOKENS` | `TOKEN_ROUNDER` | `REQUEST_ROUNDER`"
CONTEXT_PARAMETERS = """
    `params_dtype` | `num_layers` | `kv_channels` | `num_attention_heads` | `max_sequence_length`
    `buffer_size_gb` | `max_requests` | `max_tokens` | `block_size_tokens`
    `tensor_model_parallel_size` | `cache_mla_latent` | `kv_lora_rank` | `qk_pos_emb_head_dim`
    `num_cuda_graphs` | `materialize_only_last_token_logits` | `mamba_inference_state_config`
    `use_cuda_graphs_for_non_decode_steps` | `use_flashinfer_fused_rope` | `unified_memory_level`
    `cuda_graph_max_tokens` | `cuda_graph_mixed_prefill_count` | `metrics_writer`
    `request_metadata_types` | hybrid without attention layers | log line of sizes
"""
CONTEXT_MEMBERS = """
    `allocate_all_tensors` | `deallocate_all_tensors` | `round_up_tokens` | `round_up_requests`
    `round_up` | `from_config` | `is_static_batching` | `is_decode_only`
    `using_cuda_graph_this_step` | `has_unfinished_requests` | `cu_query_lengths` | `cu_kv_lengths`
    `get_active_sequence_lengths` | `get_max_sequence_lengths` | `get_active_request_count`
    `append_key_value_cache` | `key_value_cache` | `mamba_states_cache`
    `apply_fused_qk_rotary_emb` | `apply_rotary_emb_query` | `apply_rotary_emb_key`
    `reset_attention_state` | `reset_mamba_state` | `add_dummy_requests_parallel`
    `add_dummy_requests_for_cudagraph_capture` | `num_decode_requests`
    `initialize_attention_state` | `reset` | `current_input_and_position_ids`
    `last_token_logits` | `check_availability` | `add_request` | `_move_book_keeping_tensors`
    `_swap_book_keeping_tensors` | `get_index_of_chunked_prefill_request` | `update_requests`
    `calculate_log_probs` | `get_kvcache_utilization_stats` | `maybe_initialize_symmetric_memory`
"""
ENGINE_HELPERS = "`EngineSuspendedError` | `format_mem_bytes` | `RequestEntry`"
ENGINE_PARAMETERS = """
    `controller` | `context` | `enable_cuda_graph` | `random_seed` | `track_paused_request_events`
    `enable_chunked_prefill` | `inference_logging_step_interval` | `pg_collection`
"""
ENGINE_MEMBERS = """
    `reset` | `create_cuda_graphs` | `start_listening_to_data_parallel_coordinator`
    `suspend_resume_ctx` | `suspend` | `resume` | `_notify_cond_for_new_request`
    `has_unfinished_requests` | `get_request` | `_add_request` | `add_request`
    `post_process_requests` | `schedule_waiting_requests` | `schedule_non_chunked_prefill`
    `schedule_chunked_prefill` | `async_forward` | `async_bookkeep` | `async_step` | `step_modern`
    `step_legacy` | `step` | `generate` | `schedule_requests` | `stop` | `run_engine`
    `_ep_group_has_work` | `run_engine_with_coordinator` | context-state keys | step-result keys
    wandb keys | console line
"""
EXPECTED = {
    "Errors and helpers of the context": ERRORS,
    "Class constants of the context": CONSTANTS,
    "Parameters of the context": CONTEXT_PARAMETERS,
    "Methods and properties of the context": CONTEXT_MEMBERS,
    "Helpers of the engine": ENGINE_HELPERS,
    "Parameters of the engine": ENGINE_PARAMETERS,
    "Members of the engine": ENGINE_MEMBERS,
}

MAY_WAIT = {
    "`tensor_model_parallel_size`",
    "`pg_collection`",
    "`_ep_group_has_work`",
    "`create_cuda_graphs`",
    "`unified_memory_level`",
    "`maybe_initialize_symmetric_memory`",
    "`use_flashinfer_fused_rope`",
    "`apply_fused_qk_rotary_emb`",
    "wandb keys",
}
"""Groups of ranks, graph capture, managed and symmetric memory, fused rope, wandb: no others."""

MAY_BE_DROPPED = {"`round_up`", "`is_static_batching`", "`enable_cuda_graph`", "`step_legacy`"}
"""Deprecated by the peer itself, or always the same."""


class Row(NamedTuple):
    """A line of a table."""

    section: str
    item: str
    here: str
    differs: str
    shown: str

    @property
    def state(self) -> str:
        """WAITS or DROPPED; empty where it is there."""
        return next((state for state in STATES if self.here.startswith(state)), "")


def rows_of(text: str) -> Iterator[Row]:
    section = ""
    for line in text.splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif line.startswith("| ") and not line.startswith(("| item |", "| example |")):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            assert len(cells) == 4, line
            yield Row(section, *cells)


ROWS = list(rows_of(PAGE.read_text()))
TABLE = [row for row in ROWS if row.section in EXPECTED]


def name_of(row: Row) -> str:
    return f"{row.section}: {row.item}"


def find(module: str, qualname: str, parameter: str) -> None:
    """Raise unless the place exists: an attribute, a declared field, or a parameter."""
    place: object = importlib.import_module(module)
    for name in qualname.split("."):
        fields = getattr(place, "__annotations__", {})
        place = None if name in fields and not hasattr(place, name) else getattr(place, name)
    if parameter:
        assert callable(place)
        assert parameter in inspect.signature(place).parameters, f"{qualname} has no {parameter}"


@cache
def functions_of(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in tree.body if isinstance(node, kinds))


@pytest.mark.parametrize("section", EXPECTED)
def test_every_item_of_the_two_modules_has_its_row_in_its_section(section: str) -> None:
    expected = [item.strip() for item in re.split(r"[|\n]", EXPECTED[section]) if item.strip()]

    assert [row.item for row in TABLE if row.section == section] == expected


@pytest.mark.parametrize("row", TABLE, ids=name_of)
def test_a_row_says_where_and_how_and_why_and_names_a_test(row: Row) -> None:
    assert row.differs
    assert PLACE.findall(row.here) or row.state == "WAITS"
    assert TEST.findall(row.shown) or row.state == "WAITS"


@pytest.mark.parametrize("row", TABLE, ids=name_of)
def test_every_place_that_is_named_can_be_imported(row: Row) -> None:
    assert re.sub(r"\s", "", PLACE.sub("", row.here.removeprefix(row.state))) == ""
    for module, qualname, parameter in PLACE.findall(row.here):
        find(module, qualname, parameter)


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_every_test_that_is_named_exists(row: Row) -> None:
    assert re.sub(r"\s", "", TEST.sub("", row.shown)) == ""
    missing = [
        f"{path}::{name}"
        for path, name in TEST.findall(row.shown)
        if not (ROOT / path).exists() or name not in functions_of(ROOT / path)
    ]

    assert missing == []


def test_only_what_was_agreed_waits_or_is_dropped() -> None:
    assert {row.item for row in TABLE if row.state == "WAITS"} <= MAY_WAIT
    assert {row.item for row in TABLE if row.state == "DROPPED"} <= MAY_BE_DROPPED


def test_every_number_that_is_not_copied_says_what_is_right_and_names_a_test() -> None:
    numbers = [row for row in ROWS if row.section not in EXPECTED]

    assert len(numbers) >= 15
    assert [row.item for row in numbers if not row.differs or not TEST.findall(row.shown)] == []


def test_nothing_is_pending() -> None:
    assert "PENDING" not in PAGE.read_text()
