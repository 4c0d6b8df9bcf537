"""Recommendation models: tables of embeddings between two stacks of layers."""

from dataclasses import dataclass

from madmax_lib.base.fields import check_fields, dataclass_repr


@dataclass(frozen=True)
class DLRM:
    """A recommendation model: embedding tables, a bottom and a top stack of square
    layers, as MAD-Max describes it.

        model = mm.model("dlrm-a")
        dataclasses.replace(model, tables=2 * model.tables)

    pooling: lookups per table and sample. transformer_layers of width attention_dim and
    transformer_ffn on transformer_sequence tokens may stand between the stacks; with
    experts every top layer is a mixture.
    """

    name: str
    tables: int
    entries: int  # rows of a table
    embedding_dim: int  # channels of a row
    pooling: int
    bottom_layers: int
    top_layers: int
    mlp_dim: int  # inputs and outputs of a layer
    transformer_layers: int = 0
    attention_dim: int = 0
    transformer_ffn: int = 0
    transformer_sequence: int = 0
    experts: int = 0
    active_experts: int = 0

    __repr__ = dataclass_repr

    def __post_init__(self):
        check_fields(self, "tables", "entries", "embedding_dim", "pooling", "mlp_dim")

    @property
    def embedding_parameters(self) -> int:
        """Rows of all tables, in parameters."""
        return self.tables * self.entries * self.embedding_dim

    @property
    def parameters(self) -> int:
        """All parameters of the model as the paper counts them (no biases)."""
        layers = self.bottom_layers + self.top_layers * max(self.experts, 1)
        stacks = (
            layers * self.mlp_dim**2 + self.transformer_layers * self._block_weights
        )
        return self.embedding_parameters + stacks

    @property
    def _block_weights(self):
        """Parameters of a transformer layer: qkv, projection, and two of the FFN."""
        return self.attention_dim * (4 * self.attention_dim + 2 * self.transformer_ffn)

    def forward_flops(self, samples: float = 1) -> float:
        """FLOPs of the forward pass, matrix products only (no attention scores, as in
        the paper).
        """
        layers = self.bottom_layers + self.top_layers * max(self.active_experts, 1)
        tokens = self.transformer_layers * self.transformer_sequence
        stacks = layers * self.mlp_dim**2
        return samples * 2 * (stacks + tokens * self._block_weights)
