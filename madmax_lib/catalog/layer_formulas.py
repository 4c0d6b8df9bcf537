"""Amounts that follow from the dimensions of a layer, of one model or of columns of many."""


class LayerFormulas:
    """Amounts that follow from a layer's dimensions, elementwise where these are arrays:
    `Transformer` has the numbers of one model, the simulator's `Shape` columns of many.
    """

    @property
    def score_dim(self):
        """Channels of a head that queries and keys are compared by."""
        return self.head_dim + self.rope_head_dim

    @property
    def core_width(self):
        """Channels of all heads, mean of scores and values: attention takes 4 x
        core_width FLOPs per query and key.
        """
        return self.heads * (self.score_dim + self.v_head_dim) / 2

    @property
    def key_value_outputs(self):
        """Channels that the product for queries, keys and values gives per head of the
        latter two.
        """
        outputs = self.head_dim + self.v_head_dim * (1 - self.shared_values)
        return outputs * (1 - self.reused_keys)

    @property
    def router_parameters(self):
        """Parameters that choose the experts of a token."""
        return (self.hidden + self.router_bias) * self.experts

    @property
    def expert_inputs(self):
        """Channels that experts see: the model's, or those of a latent."""
        return self.expert_latent + self.hidden * (self.expert_latent == 0)

    @property
    def latent_parameters(self):
        """Parameters of the products into the latent of experts and out of it."""
        return 2 * self.hidden * self.expert_latent

    @property
    def expert_parameters(self):
        """Parameters of a routed expert."""
        return self.mlp_parameters(self.expert_ffn, self.expert_inputs)

    @property
    def shared_parameters(self):
        """Parameters of the shared experts of a layer."""
        return self.shared_experts * self.mlp_parameters(self.expert_ffn)

    def mlp_parameters(self, width, inputs=None):
        """Parameters of a feed-forward block of that width, on the model's channels or
        so many inputs.
        """
        matrices = 2 + self.gated
        inputs = self.hidden if inputs is None else inputs
        biases = (matrices - 1) * width + inputs
        return matrices * inputs * width + self.mlp_bias * biases
