"""How much memory do chunks waste? Tensors in the order of the model, packed into chunks of one size.

PatrickStar [arXiv 2108.05818] and Gemini move model states in chunks: parameters fill a chunk in order, a tensor that
does not fit in what is left opens the next one, and the rest of the chunk stays empty. The size is searched so that the
tails are small. A tensor larger than a chunk, as an embedding table can be, gets one of its own. The four lists (16-bit
weights, fp32 weights, two moments) are cut alike; gradients take the place of the 16-bit weights: 14 bytes a parameter.
"""

from functools import lru_cache

from madmax_lib.specs import Transformer

__all__ = ["chunk_waste"]

_MI = 2**20
# elements; from 32 Mi over a range of 128 Mi, as dheerj188/HeterogeneousTraining-IISc runs Gemini
_SIZES = range(32 * _MI, 161 * _MI, 4 * _MI)


def _tensor_sizes(model: Transformer) -> list[int]:
    """Elements of every parameter tensor, in the order of the model."""
    h, norm = model.hidden, model.norm_parameters
    attention = [inputs * outputs for _, inputs, outputs in model.attention_matrices]
    rest = model.attention_parameters - sum(attention)  # biases and norms of queries and keys
    layers = []
    for layer in range(model.layers):
        mixture = model.experts and layer >= model.dense_layers
        width, copies = (model.expert_ffn, model.experts + model.shared_experts) if mixture else (model.ffn, 1)
        matrices = [h * width] * (3 if model.gated else 2)
        biases = [model.mlp_parameters(width) - sum(matrices)] if model.mlp_bias else []
        router = [(h + model.router_bias) * model.experts] if mixture else []
        layers += [norm, *attention, *([rest] if rest else []), norm, *router, *copies * [*matrices, *biases]]
    table = 3 * model.patch**2 * h + h if model.image else model.vocab * h
    positions = model.embedding_parameters - table
    return [size for size in (table, positions, *layers, norm, model.head_parameters) if size]


def _packed(sizes: list[int], chunk: int) -> float:
    """Share 0..1 that is empty of the chunks that hold tensors of these sizes in order.

    >>> _packed([3, 3, 3, 9], 8)  # 7 of two chunks of 8 and one of 9
    0.28
    """
    chunks: list[int] = []  # elements of each
    room = 0  # left in the open one
    for size in sizes:
        if size > chunk:
            chunks.append(size)  # one of its own
        elif size > room:
            chunks.append(chunk)
            room = chunk - size
        else:
            room -= size
    return 1 - sum(sizes) / sum(chunks)


@lru_cache(maxsize=256)
def chunk_waste(model: Transformer) -> float:
    """Share 0..1 of the elements of a model's chunks that is empty, at the chunk size with the smallest tails.

    Sizes from 32 to 160 Mi elements in steps of 4 Mi; a smaller model gets one chunk.
    """
    sizes = _tensor_sizes(model)
    if sum(sizes) <= _SIZES.start:
        return _packed(sizes, sum(sizes))
    return min(_packed(sizes, chunk) for chunk in _SIZES)
