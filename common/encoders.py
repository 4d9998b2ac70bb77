"""The one table of encoder families: their module names in transformers, and the keys of sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderFamily:
    """A family of sequence classifiers in transformers.

    Module names are dotted. Those of a block are relative to the block, all others to the network;
    None if the family has no such module. Parts with the same name are the rows of one module, in
    the order of the fields. Llama is a decoder, but its classifier is built like the others:
    embeddings, blocks, head.
    """

    name: str
    model_type: str
    network_class: str

    # The network.
    embeddings: str  # from ids to the hidden states that enter the first block
    word_embeddings: str
    position_embeddings: str | None = None
    relative_positions: str | None = None  # a bias for each head and bucket of distances
    token_type_embeddings: str | None = None
    embedding_norm: str | None = None
    embedding_projection: str | None = None  # if embeddings are narrower than the hidden states
    blocks: str
    final_norm: str | None = None  # after the last block
    pooler: str | None = None  # the linear layer between the last block and the classifier
    pooler_activation: str = ""
    pooler_norm: str | None = None
    classifier: str = "classifier"
    head_dropout: tuple[str, ...] = ()

    # A block. Its two norms follow the residual sums, or, in a family with a final norm, precede
    # attention and feed-forward.
    attention: str  # gets the hidden states once, for query, key and value
    query: str
    key: str
    value: str
    attention_output: str
    attention_norm: str
    attention_dropout: tuple[str, ...] = ()  # of the attention weights
    # Of a gated family: gets the hidden states once, for gate and intermediate.
    feed_forward: str | None = None
    gate: str | None = None  # its activation times the intermediate features goes to the output
    intermediate: str
    output: str
    output_norm: str
    # Of what attention and feed-forward add to the hidden states.
    output_dropout: tuple[str, ...] = ()

    # Keys of config.json. All families have `vocab_size`, `max_position_embeddings` and `id2label`.
    num_layers_key: str = "num_hidden_layers"
    num_heads_key: str = "num_attention_heads"
    hidden_size_key: str = "hidden_size"
    intermediate_size_key: str = "intermediate_size"
    activation_key: str = "hidden_act"
    norm_epsilon: str | float = "layer_norm_eps"  # a key, or the value that the family fixes

    has_biases: bool = True  # False: some configurations have none
    # Positions count from behind it: a key, or the id that the family fixes.
    padding_id: str | int | None = None

    @property
    def head(self) -> tuple[str, ...]:
        """The modules behind the last block that hold parameters."""
        return tuple(name for name in (self.final_norm, self.pooler, self.classifier) if name)

    def depth_of(self, parameter: str, num_blocks: int) -> int:
        """How far above the input a parameter of the network is, by its name: 0 in the embeddings,
        1 in the lowest of ``num_blocks`` blocks, one more than in the highest block in the head.
        """
        if parameter.startswith(f"{self.blocks}."):
            return 1 + int(parameter.removeprefix(f"{self.blocks}.").partition(".")[0])
        inputs = (self.embeddings, self.embedding_projection, self.relative_positions)
        is_input = any(name and parameter.startswith(f"{name}.") for name in inputs)
        return 0 if is_input else num_blocks + 1


DISTILBERT = EncoderFamily(
    name="DistilBERT",
    model_type="distilbert",
    network_class="DistilBertForSequenceClassification",
    embeddings="distilbert.embeddings",
    word_embeddings="distilbert.embeddings.word_embeddings",
    position_embeddings="distilbert.embeddings.position_embeddings",
    embedding_norm="distilbert.embeddings.LayerNorm",
    blocks="distilbert.transformer.layer",
    pooler="pre_classifier",
    pooler_activation="relu",
    head_dropout=("dropout",),
    attention="attention",
    query="attention.q_lin",
    key="attention.k_lin",
    value="attention.v_lin",
    attention_output="attention.out_lin",
    attention_norm="sa_layer_norm",
    attention_dropout=("attention.dropout",),
    intermediate="ffn.lin1",
    output="ffn.lin2",
    output_norm="output_layer_norm",
    output_dropout=("ffn.dropout",),
    num_layers_key="n_layers",
    num_heads_key="n_heads",
    hidden_size_key="dim",
    intermediate_size_key="hidden_dim",
    activation_key="activation",
    norm_epsilon=1e-12,
)
BERT = EncoderFamily(
    name="BERT",
    model_type="bert",
    network_class="BertForSequenceClassification",
    embeddings="bert.embeddings",
    word_embeddings="bert.embeddings.word_embeddings",
    position_embeddings="bert.embeddings.position_embeddings",
    token_type_embeddings="bert.embeddings.token_type_embeddings",
    embedding_norm="bert.embeddings.LayerNorm",
    blocks="bert.encoder.layer",
    pooler="bert.pooler.dense",
    pooler_activation="tanh",
    head_dropout=("dropout",),
    attention="attention.self",
    query="attention.self.query",
    key="attention.self.key",
    value="attention.self.value",
    attention_output="attention.output.dense",
    attention_norm="attention.output.LayerNorm",
    attention_dropout=("attention.self.dropout",),
    intermediate="intermediate.dense",
    output="output.dense",
    output_norm="output.LayerNorm",
    output_dropout=("attention.output.dropout", "output.dropout"),
)
ROBERTA = replace(
    BERT,
    name="RoBERTa",
    model_type="roberta",
    network_class="RobertaForSequenceClassification",
    embeddings="roberta.embeddings",
    word_embeddings="roberta.embeddings.word_embeddings",
    position_embeddings="roberta.embeddings.position_embeddings",
    token_type_embeddings="roberta.embeddings.token_type_embeddings",
    embedding_norm="roberta.embeddings.LayerNorm",
    blocks="roberta.encoder.layer",
    pooler="classifier.dense",
    classifier="classifier.out_proj",
    head_dropout=("classifier.dropout",),
    padding_id="pad_token_id",
)
XLM_ROBERTA = replace(
    ROBERTA,
    name="XLM-RoBERTa",
    model_type="xlm-roberta",
    network_class="XLMRobertaForSequenceClassification",
)
CAMEMBERT = replace(
    ROBERTA,
    name="CamemBERT",
    model_type="camembert",
    network_class="CamembertForSequenceClassification",
)
# Its small models have embeddings that are narrower than the hidden states, hence the projection.
ELECTRA = replace(
    BERT,
    name="ELECTRA",
    model_type="electra",
    network_class="ElectraForSequenceClassification",
    embeddings="electra.embeddings",
    word_embeddings="electra.embeddings.word_embeddings",
    position_embeddings="electra.embeddings.position_embeddings",
    token_type_embeddings="electra.embeddings.token_type_embeddings",
    embedding_norm="electra.embeddings.LayerNorm",
    embedding_projection="electra.embeddings_project",
    blocks="electra.encoder.layer",
    pooler="classifier.dense",
    pooler_activation="gelu",
    classifier="classifier.out_proj",
    head_dropout=("classifier.dropout",),
)
# Its positions begin behind id 1, whatever config.json says of padding.
MPNET = EncoderFamily(
    name="MPNet",
    model_type="mpnet",
    network_class="MPNetForSequenceClassification",
    embeddings="mpnet.embeddings",
    word_embeddings="mpnet.embeddings.word_embeddings",
    position_embeddings="mpnet.embeddings.position_embeddings",
    relative_positions="mpnet.encoder.relative_attention_bias",
    embedding_norm="mpnet.embeddings.LayerNorm",
    blocks="mpnet.encoder.layer",
    pooler="classifier.dense",
    pooler_activation="tanh",
    classifier="classifier.out_proj",
    head_dropout=("classifier.dropout",),
    attention="attention.attn",
    query="attention.attn.q",
    key="attention.attn.k",
    value="attention.attn.v",
    attention_output="attention.attn.o",
    attention_norm="attention.LayerNorm",
    attention_dropout=("attention.attn.dropout",),
    intermediate="intermediate.dense",
    output="output.dense",
    output_norm="output.LayerNorm",
    output_dropout=("attention.dropout", "output.dropout"),
    padding_id=1,
)
# Positions are rotations of query and key, so it has no table of them. Query, key and value are
# the rows of one matrix, and so are gate and intermediate.
MODERNBERT = EncoderFamily(
    name="ModernBERT",
    model_type="modernbert",
    network_class="ModernBertForSequenceClassification",
    embeddings="model.embeddings",
    word_embeddings="model.embeddings.tok_embeddings",
    embedding_norm="model.embeddings.norm",
    blocks="model.layers",
    final_norm="model.final_norm",
    pooler="head.dense",
    pooler_norm="head.norm",
    head_dropout=("drop",),
    attention="attn",
    query="attn.Wqkv",
    key="attn.Wqkv",
    value="attn.Wqkv",
    attention_output="attn.Wo",
    attention_norm="attn_norm",
    feed_forward="mlp",
    intermediate="mlp.Wi",
    gate="mlp.Wi",
    output="mlp.Wo",
    output_norm="mlp_norm",
    output_dropout=("attn.out_drop", "mlp.drop"),
    activation_key="hidden_activation",
    norm_epsilon="norm_eps",
    has_biases=False,
)
# Its classifier reads the last token, so it has no pooler and no dropout in the head.
LLAMA = EncoderFamily(
    name="Llama",
    model_type="llama",
    network_class="LlamaForSequenceClassification",
    embeddings="model.embed_tokens",
    word_embeddings="model.embed_tokens",
    blocks="model.layers",
    final_norm="model.norm",
    classifier="score",
    attention="self_attn",
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    attention_output="self_attn.o_proj",
    attention_norm="input_layernorm",
    feed_forward="mlp",
    gate="mlp.gate_proj",
    intermediate="mlp.up_proj",
    output="mlp.down_proj",
    output_norm="post_attention_layernorm",
    norm_epsilon="rms_norm_eps",
)
# Not among the families below, because it does not classify.
LLAMA_LANGUAGE_MODEL = replace(LLAMA, network_class="LlamaForCausalLM", classifier="lm_head")

FAMILIES = (DISTILBERT, BERT, ROBERTA, XLM_ROBERTA, CAMEMBERT, ELECTRA, MPNET, MODERNBERT, LLAMA)

# These number positions from behind the padding id (`create_position_ids_from_input_ids` in
# transformers), so that many rows of their position table are never used.
_POSITIONS_AFTER_PADDING = (
    *("camembert", "data2vec-text", "esm", "ibert", "lilt", "longformer", "luke", "mpnet"),
    *("roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
)


def max_positions(config: Mapping[str, Any]) -> int | None:
    """How many tokens the position table of a model has room for; None without a table."""
    positions = config.get("max_position_embeddings", config.get("n_positions"))
    if positions is not None and config.get("model_type") in _POSITIONS_AFTER_PADDING:
        positions -= config.get("pad_token_id", 1) + 1
    return positions
