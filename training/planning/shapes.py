"""Shapes: the plain records that a plan is made of. A network, a layout, and what is predicted for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Family = Literal["distilbert", "bert", "roberta", "llama", "gpt2"]
StrategyName = Literal["ddp", "zero1", "zero2", "zero3", "tp", "pp", "3d"]
Precision = Literal["fp32", "bf16", "fp16"]
ActivationCheckpointing = Literal["none", "selective", "full"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"]

# The last block of these computes its query, output projection and feed-forward for the first token alone
# (training/model/classifier.py), since nothing but that token reaches the classifier.
FIRST_TOKEN_FAMILIES = ("distilbert", "bert")


@dataclass(frozen=True)
class ModelShape:
    """A transformer's dimensions: all that memory and work depend on.

    ``num_labels``: classes of the classification head; None = a language model's head over the vocabulary.
    ``type_vocab``: rows of the token-type embedding. ``head_dim``: width of one attention head.
    ``norm_after``: the encoder's norms stand after each sum (BERT), so that its embedding ends with one too.
    ``dropout``: the network drops values in training, so that masks are kept for the backward pass.
    ``source``: the hub name or folder that training loads the network from; empty where there are dimensions alone.
    """

    name: str
    family: Family
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    max_positions: int
    head_dim: int
    type_vocab: int = 0
    gated_ffn: bool = False
    causal: bool = False
    tied_embeddings: bool = False
    num_labels: int | None = None
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    biases: bool = True
    learned_positions: bool = True
    dropout: bool = True
    source: str = ""

    @property
    def norm_after(self) -> bool:
        """Whether the norms stand after the sums, as in BERT."""
        return self.family in ("distilbert", "bert", "roberta")

    @property
    def query_width(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def key_value_width(self) -> int:
        """Width of all key heads together; the values' is the same."""
        return self.kv_heads * self.head_dim

    @property
    def attention_weights(self) -> int:
        """Entries of a block's query, key, value and output matrices."""
        return 2 * self.hidden * (self.query_width + self.key_value_width)

    @property
    def ffn_weights(self) -> int:
        """Entries of a block's feed-forward matrices: two, or three where one gates."""
        return (3 if self.gated_ffn else 2) * self.hidden * self.intermediate

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm."""
        return self.hidden * (2 if self.norm == "layernorm" else 1)

    @property
    def block_parameters(self) -> int:
        """Parameters of one block."""
        biases = self.query_width + 2 * self.key_value_width + 2 * self.hidden + self.intermediate
        matrices = self.attention_weights + self.ffn_weights
        return matrices + (biases if self.biases else 0) + 2 * self.norm_parameters

    @property
    def embedding_parameters(self) -> int:
        """Parameters before the first block: words, positions, types and, in BERT's family, a norm."""
        rows = self.vocab + self.type_vocab + (self.max_positions if self.learned_positions else 0)
        return rows * self.hidden + (self.norm_parameters if self.norm_after else 0)

    @property
    def head_parameters(self) -> int:
        """Parameters after the last block: the final norm, and the classifier or the language model's head."""
        final_norm = 0 if self.norm_after else self.norm_parameters
        if self.num_labels is None:
            return final_norm + (0 if self.tied_embeddings else self.vocab * self.hidden)
        if self.norm_after:  # a dense layer, then the classifier, both with biases
            return self.hidden * self.hidden + self.hidden + (self.hidden + 1) * self.num_labels
        return final_norm + self.hidden * self.num_labels

    @property
    def num_parameters(self) -> int:
        """All parameters, a tied one counted once."""
        return self.layers * self.block_parameters + self.embedding_parameters + self.head_parameters

    @property
    def reads_first_token_only(self) -> bool:
        """Whether the last block computes the first token alone."""
        return self.family in FIRST_TOKEN_FAMILIES and self.num_labels is not None

    def block_flops(self, seq_len: int) -> float:
        """Floating-point operations of one block's matrix work, forward, for one row of ``seq_len`` tokens."""
        attention = 4 * seq_len * seq_len * self.query_width
        return 2.0 * seq_len * (self.attention_weights + self.ffn_weights) + attention

    def last_block_flops(self, seq_len: int) -> float:
        """The same of the last block."""
        if not self.reads_first_token_only:
            return self.block_flops(seq_len)
        keys_and_values = 2 * self.hidden * self.key_value_width
        first_token = self.attention_weights - keys_and_values + self.ffn_weights
        return 2.0 * (seq_len * keys_and_values + first_token) + 4 * seq_len * self.query_width

    def head_flops(self, seq_len: int) -> float:
        """The same of the head: every token of a language model, one token of a classifier."""
        if self.num_labels is None:
            return 2.0 * seq_len * self.hidden * self.vocab
        return 2.0 * self.hidden * (self.num_labels + (self.hidden if self.norm_after else 0))

    def forward_flops(self, seq_len: int) -> float:
        """Floating-point operations of the matrix work of one row, forward.

        The backward pass takes twice as many. Scores above the diagonal of a causal model count, as is usual where
        utilisation is reported.

        Source: PaLM, arXiv 2204.02311, appendix B.
        """
        return (self.layers - 1) * self.block_flops(seq_len) + self.last_block_flops(seq_len) + self.head_flops(seq_len)


@dataclass(frozen=True)
class Layout:
    """How a model lies over ranks, and the batch that each of them works on.

    ``pp``, ``dp_replicate``, ``dp_shard``, ``tp``: the degrees; their product is the number of ranks.
    ``micro_batch``: rows; ``accumulation``: micro-batches of one optimizer step, the pipeline's too.
    """

    strategy: StrategyName
    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    micro_batch: int = 1
    accumulation: int = 1
    seq_len: int = 2048
    precision: Precision = "bf16"
    activation_checkpointing: ActivationCheckpointing = "none"
    sequence_parallel: bool = False
    schedule: Schedule = "1f1b"

    @property
    def ranks(self) -> int:
        """Processes, one a GPU."""
        return self.pp * self.dp_replicate * self.dp_shard * self.tp

    @property
    def dp(self) -> int:
        """Ranks, or groups of ranks, that see different rows."""
        return self.dp_replicate * self.dp_shard

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a global batch."""
        return self.micro_batch * self.accumulation * self.dp * self.seq_len


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on the GPU that needs the most.

    ``communication``: whole weights gathered from shards, copies in the computing dtype, gradient buckets.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    communication: float

    @property
    def total(self) -> float:
        """Their sum."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.communication


@dataclass(frozen=True)
class Transfer:
    """One kind of collective in a step, as one rank sees it.

    ``dimension``: the mesh dimension it runs over; ``calls``: in one step; ``bytes``: what this rank sends in
    all of them; ``between_nodes``: those of the bytes that leave the node; ``seconds``: for all calls.
    """

    collective: Literal["all-reduce", "all-gather", "reduce-scatter", "broadcast", "send"]
    dimension: Literal["pp", "dp", "dp_replicate", "dp_shard", "tp"]
    calls: int
    bytes: float
    between_nodes: float
    seconds: float


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step. ``communication``: the part that no computation hides."""

    compute: float
    communication: float
    bubble: float
    optimizer: float

    @property
    def total(self) -> float:
        """Their sum."""
        return self.compute + self.communication + self.bubble + self.optimizer
