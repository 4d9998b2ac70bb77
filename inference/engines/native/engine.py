"""The engine on top of `kernels.c`: int8, without padding and with no runtime but numpy."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from inference.engines.base import CPU_BATCH_TOKENS, PASSES_AT_ONCE, TokenBatch
from inference.engines.native.architecture import EncoderShape
from inference.engines.native.library import BlockStruct, LinearStruct, ModelStruct, NormStruct, load_library
from inference.engines.native.quantize import FILE_NAME

_ALIGNMENT = 64
_LINEARS = ("query", "key_value", "attention_out", "wide", "narrow")


class NativeEngine:
    """Runs a BERT or DistilBERT classifier in int8 on AVX512-VNNI; see `inference.engines.base.Engine`."""

    name = "native int8"
    batch_tokens = CPU_BATCH_TOKENS
    pads = False

    def __init__(self, folder: Path, config: Mapping[str, Any], threads: int) -> None:
        """Read the packed weights that `quantize.write_native` wrote, to run them on so many threads.

        Raises:
            OSError: The compiled kernels or the weights cannot be read.
            MemoryError: There is not enough memory for the buffers.
            ValueError: The weights do not fit the configuration, or the kernels do not compute this model.
        """
        self.num_slots = threads
        self._shape = EncoderShape.of(config)
        self._library = load_library()
        self._tensors = {name: _aligned(array) for name, array in load_file(folder / FILE_NAME).items()}
        self._model = self._model_struct()
        self._threads = _Threads(self._library, self._model, threads)

    def logits(self, batch: TokenBatch, threads: int = 1) -> NDArray[np.float32]:
        self._check(batch)
        num_texts = len(batch.lengths)
        ids = np.ascontiguousarray(batch.ids, dtype=np.int32)
        starts = np.zeros(num_texts + 1, dtype=np.int32)
        np.cumsum(batch.lengths, out=starts[1:])
        logits = np.empty((num_texts, self._shape.num_labels), dtype=np.float32)
        here = self._threads
        if here.process != os.getpid():  # after a fork, which copies memory but not threads
            here = self._threads = _Threads(self._library, self._model, self.num_slots)
        # A session has the buffers of one pass at a time; if all are in use, wait for one. ctypes releases the
        # interpreter's lock during the call, so passes really run in parallel.
        session = here.sessions.get()
        try:
            failed = self._library.forward(
                session,
                ids.ctypes.data,
                starts.ctypes.data,
                num_texts,
                min(threads, self.num_slots),
                logits.ctypes.data,
            )
        finally:
            here.sessions.put(session)
        if failed:
            raise MemoryError(f"no memory for a forward pass over {starts[-1]} tokens")
        return logits

    def _check(self, batch: TokenBatch) -> None:
        # The kernels trust their input, so whatever would read outside of a table has to be refused here.
        if len(batch.ids) != int(batch.lengths.sum()) or len(batch.lengths) == 0 or batch.lengths.min() < 1:
            raise ValueError(
                "a batch needs at least one text, a token in each text, and lengths that sum to its tokens"
            )
        if batch.lengths.max() > self._shape.num_positions:
            raise ValueError(f"{batch.lengths.max()} tokens > maximum {self._shape.num_positions}")
        if batch.ids.min() < 0 or batch.ids.max() >= self._shape.vocab_size:
            raise ValueError(f"token ids must be 0 to {self._shape.vocab_size - 1}")

    def _model_struct(self) -> ModelStruct:
        shape = self._shape
        width = shape.hidden_size
        self._blocks = (BlockStruct * shape.num_layers)()
        for index in range(shape.num_layers):
            self._fill_block(self._blocks[index], f"block.{index}.")
        return ModelStruct(
            blocks=shape.num_layers,
            width=width,
            wide=shape.intermediate_size,
            heads=shape.num_heads,
            labels=shape.num_labels,
            activation=shape.activation,
            head_is_tanh=shape.head_is_tanh,
            norm_epsilon=shape.norm_epsilon,
            words=self._pointer("words", np.float16, (shape.vocab_size, width)),
            positions=self._pointer("positions", np.float32, (shape.num_positions, width)),
            embedding_norm=self._norm("embedding_norm"),
            block=self._blocks,
            pooler_weight=self._pointer("pooler.weight", np.float32, (width, width)),
            pooler_bias=self._pointer("pooler.bias", np.float32, (width,)),
            classifier_weight=self._pointer("classifier.weight", np.float32, (shape.num_labels, width)),
            classifier_bias=self._pointer("classifier.bias", np.float32, (shape.num_labels,)),
        )

    def _fill_block(self, block: BlockStruct, prefix: str) -> None:
        width, wide = self._shape.hidden_size, self._shape.intermediate_size
        # (outputs, inputs) of each; keys and values are one product.
        sizes = ((width, width), (2 * width, width), (width, width), (wide, width), (width, wide))
        for name, (outputs, inputs) in zip(_LINEARS, sizes, strict=True):
            setattr(block, name, self._linear(prefix + name, outputs, inputs))
        block.attention_norm = self._norm(f"{prefix}attention_norm")
        block.output_norm = self._norm(f"{prefix}output_norm")

    def _linear(self, name: str, outputs: int, inputs: int) -> LinearStruct:
        return LinearStruct(
            outputs=outputs,
            inputs=inputs,
            weight=self._pointer(f"{name}.weight", np.int8, (-(-outputs // 64), inputs // 4, 64, 4)),
            scale=self._pointer(f"{name}.scale", np.float32, (outputs,)),
            row_offset=self._pointer(f"{name}.row_offset", np.float32, (outputs,)),
            bias=self._pointer(f"{name}.bias", np.float32, (outputs,)),
        )

    def _norm(self, name: str) -> NormStruct:
        shape = (self._shape.hidden_size,)
        return NormStruct(
            gain=self._pointer(f"{name}.gain", np.float32, shape), bias=self._pointer(f"{name}.bias", np.float32, shape)
        )

    def _pointer(self, name: str, dtype: type, shape: tuple[int, ...]) -> int:
        array = self._tensors.get(name)
        if array is None or array.dtype != dtype or array.shape != shape:
            found = "nothing" if array is None else f"{array.dtype} {array.shape}"
            raise ValueError(f"{FILE_NAME}: {name} must be {np.dtype(dtype)} {shape}, found {found}")
        return array.ctypes.data


class _Threads:
    """The helper threads of one model in one process, and the sessions that share them."""

    def __init__(self, library: ctypes.CDLL, model: ModelStruct, threads: int) -> None:
        self.process = os.getpid()
        # The calling thread works too, so a pool of n threads has n - 1 helpers.
        self.sessions: SimpleQueue[ctypes.c_void_p] = SimpleQueue()
        self._library = library
        self._opened: list[ctypes.c_void_p] = []
        self._pool = ctypes.c_void_p(library.open_pool(ctypes.byref(model), threads - 1))
        for _ in range(min(threads, PASSES_AT_ONCE)):
            session = ctypes.c_void_p(self._pool and library.open_session(self._pool))
            if not session:
                raise MemoryError("no memory for the sessions of the native engine")
            self._opened.append(session)
            self.sessions.put(session)

    def __del__(self) -> None:
        # In a forked child this is only a copy of the parent's pool: there are no threads to join.
        if self._pool and self.process == os.getpid():
            self._library.close_pool(self._pool)
            for session in self._opened:
                self._library.close_session(session)


def _aligned(array: NDArray[Any]) -> NDArray[Any]:
    # The kernels load whole cache lines, but a file promises no alignment.
    memory = np.empty(array.nbytes + _ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    aligned = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    aligned[...] = array
    return aligned
