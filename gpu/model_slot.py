"""The place of a runner's model: which weights it has, whether they are there, and what comes next.

Weights are exchanged in two halves. `prepare` reads and checks the new ones and changes nothing of
what is computed; `commit` then cannot fail for anything that is in a file. Where the device has no
room for both, the old weights wait on the host meanwhile.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import torch

from callboard.gpu.device import describe_device, release_memory
from callboard.gpu.device_errors import is_out_of_memory
from callboard.gpu.loading import LoadedModel, ModelError, check_model, load_model, read_config
from callboard.gpu.models.config import DecoderConfig
from callboard.gpu.offload import OffloadedModel
from callboard.messages.control import Weights
from callboard.messages.errors import CallboardError, WeightsError

SHAPE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "tie_word_embeddings",
    "qkv_bias",
    "output_bias",
    "mlp_bias",
    "qk_norm",
)
"""What models must have in common that can take each other's place."""

ROOM = 1.1
"""How many times their own size new weights need beside the old ones, to be read there."""


class NotReady(CallboardError):
    """The weights or the KV cache are not there; nothing was changed."""


class _Prepared(msgspec.Struct, frozen=True):
    """Weights that are about to be used; the model is None where they are to be read later."""

    weights: Weights
    model: LoadedModel | None


class ModelSlot:
    """A model that can be loaded, freed, offloaded, and exchanged for one of the same shape.

    Args:
        weights: what to load first.
        shape: what every model here must be like.
        max_model_len: how many tokens its context must hold at least.
        device, dtype, attention: see `load_model`.
    """

    def __init__(
        self,
        weights: Weights,
        *,
        shape: DecoderConfig,
        max_model_len: int,
        device: torch.device,
        dtype: torch.dtype,
        attention: str,
    ) -> None:
        self.weights = weights
        self._shape = shape
        self._max_model_len = max_model_len
        self._device = device
        self._dtype = dtype
        self._attention = attention
        self._model: LoadedModel | None = None
        self._offloaded: OffloadedModel | None = None
        self._prepared: _Prepared | None = None

    @property
    def loaded(self) -> bool:
        """Whether the weights are on the device."""
        return self._model is not None

    @property
    def holds_weights(self) -> bool:
        """Whether there are weights here, be they on the device or on the host."""
        held = (self._model, self._offloaded, self._prepared)
        return any(each is not None for each in held)

    @property
    def model(self) -> LoadedModel:
        """The model; raises NotReady where its weights are not on the device."""
        if self._model is None:
            raise NotReady("the weights are not loaded: call load first")
        return self._model

    def load(self) -> None:
        """Take the weights from the host or read them; does nothing where they are there.

        Raises WeightsError where they are no model or do not fit, and changes nothing then.
        """
        if self._offloaded is not None:
            self._model, self._offloaded = self._offloaded.restore(), None
            release_memory(self._device)  # the host's
        if self._model is None:
            with _failures():
                self._model = self._read(self.weights.source)

    def free(self) -> None:
        """Let the weights go, wherever they are, and what was prepared."""
        self._prepared = self._model = self._offloaded = None

    def offload(self) -> None:
        """Keep the weights on the host until `load`. Raises what `host_copies` raises."""
        self.cancel()
        if self._model is not None:
            self._offloaded, self._model = OffloadedModel(self._model), None

    # Other weights

    def prepare(self, weights: Weights) -> None:
        """Read and check weights; where none are loaded, only check them.

        Raises WeightsError, naming file and tensor, where they cannot be used; the present ones
        are used on then. Weights that are used already need no preparation.
        """
        self.cancel()
        if weights == self.weights:
            return
        with _failures():
            self._check_shape(weights.source)
            check_model(weights.source)
            model = self._read_beside(weights.source) if self.loaded else None
        self._prepared = _Prepared(weights, model)

    def commit(self, weights: Weights) -> None:
        """Use weights from now on, those that were prepared or, where they were not, read now.

        Raises what `prepare` raises, and changes nothing then.
        """
        if self._prepared is None or self._prepared.weights != weights:
            self.cancel()
            if self.loaded:
                self.prepare(weights)
        if weights != self.weights:
            self._model = None if self._prepared is None else self._prepared.model
            self._offloaded = None
        self.weights, self._prepared = weights, None
        release_memory(self._device)

    def cancel(self) -> None:
        """Forget what was prepared, and have the present weights where they were before."""
        if self._prepared is None:
            return
        made_room = self._prepared.model is not None and self._model is None
        self._prepared = None
        release_memory(self._device)
        if made_room:
            self.load()

    def _read(self, source: str) -> LoadedModel:
        with torch.inference_mode():
            return load_model(
                source, device=self._device, dtype=self._dtype, attention=self._attention
            )

    def _read_beside(self, source: str) -> LoadedModel:
        """Read new weights; the old ones make room for them where there is none for both."""
        available = describe_device(self._device, self._dtype).available_bytes
        if available > ROOM * self.model.weights_bytes:
            return self._read(source)
        self.offload()
        release_memory(self._device)
        try:
            return self._read(source)
        except BaseException:
            self.load()
            raise

    def _check_shape(self, source: str) -> None:
        new = read_config(source).decoder
        for name in SHAPE:
            is_, must_be = getattr(new, name), getattr(self._shape, name)
            if is_ != must_be:
                raise ModelError(f"{source}: {name} is {is_}, and must be {must_be} as before")
        if new.max_sequence_length < self._max_model_len:
            raise ModelError(
                f"{source}: its context is {new.max_sequence_length} tokens long, and must be"
                f" {self._max_model_len} as before"
            )


@contextmanager
def _failures() -> Iterator[None]:
    """Raise as WeightsError whatever keeps weights from being read."""
    try:
        yield
    except (ModelError, OSError, RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and not is_out_of_memory(error):
            raise
        raise WeightsError(str(error)) from error
