"""Seconds of the parts of a step, each alone on a device: products, attention, other
kernels, and collectives inside a node.

What a call takes inside a step is longer: clocks, power and other streams. Arrays
broadcast, and the facts are looked up once per device: `catalog.kernel_rates` has the
equation and what a device without measured rows takes.
"""

import functools
from collections.abc import Mapping

import numpy as np

from madmax_lib.catalog import Device
from madmax_lib.catalog.kernel_rates import OPERANDS, KernelWork, Number, kernel_rates
from madmax_lib.simulator.layers.ops import BYTES
from madmax_lib.simulator.rates.compute import attention_flops

# (rows, columns, slowdown) of tiles of a product that libraries choose from: small
# ones reload operands more often (by the A100's and L40S' measured products)
_TILES = ((128, 256, 1.0), (128, 128, 1.06), (64, 64, 1.3))
_QUERIES = 128  # of a block in FlashAttention-2 [arXiv 2307.08691]
_CHUNK = 64  # tokens that kernels of the gated delta rule multiply at once


def product_s(
    device: str | Device, m: Number, n: Number, k: Number, dtype: str = "bf16"
) -> Number:
    """Seconds of the product of (m, k) and (k, n) matrices, with a 16-bit result.

    device: of the catalog by name, or one of your own. dtype: of `hardware.DTYPES`, or
    fp8_block, whose scales go by blocks; a device that lacks it computes in what stands
    for it. Below 16 bits the first operand comes in 16 and is quantized first. Raises
    ValueError for an unknown device or dtype. Source: `data/kernel_rates.csv`.

    >>> [f"{each:.2g}" for each in product_s("h100", 4096, [4096, 8192], 4096)]
    ['0.00018', '0.00035']
    """
    return kernel_s(device, "gemm", dtype=dtype, m=m, n=n, k=k)


def attention_s(
    device: str | Device,
    *,
    batch: Number,
    sequence: Number,
    heads: Number,
    kv_heads: Number,
    head_dim: Number,
    dtype: str = "bf16",
    causal: bool = True,
) -> Number:
    """Seconds of the forward pass of fused attention of `batch` sequences of `sequence`
    tokens.

    device, dtype and ValueError: as in `product_s`; 2.5 to 3 times as long is a
    backward pass [arXiv 2307.08691]. Source: `data/kernel_rates.csv`.

    >>> shape = {"batch": 1, "sequence": 8192, "heads": 32, "kv_heads": 8}
    >>> f"{attention_s('h100', **shape, head_dim=128):.2g}"
    '0.00098'
    """
    return kernel_s(
        device,
        "attention",
        dtype=dtype,
        batch=batch,
        sequence=sequence,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        causal=causal,
    )


def kernel_s(
    device: str | Device,
    operation: str,
    flops: Number = 0.0,
    size_bytes: Number = 0.0,
    dtype: str = "bf16",
    **shape: Number,
) -> Number:
    """Seconds of any kernel, moe among them, that computes and moves so much.

    operation: of `data/kernel_rates.csv`, of a shape as in `work_of`. moe: the products
    of the experts that a device holds, 6 FLOPs per routed token, channel of hidden and
    of the expert's width; bytes of their weights and of what the products read and
    write. convolution: the causal one of a state-space layer, forward. delta_rule: the
    gated one of linear attention, forward; of a shape in place of FLOPs and bytes,
    `batch`, `sequence`, `heads` of values, `kv_heads` of keys and queries, `head_dim`
    [arXiv 2412.06464].

    >>> shape = {"batch": 1, "sequence": 8192, "heads": 32, "kv_heads": 16}
    >>> f"{kernel_s('h100', 'delta_rule', **shape, head_dim=128):.2g}"
    '0.00039'
    """
    prices = kernel_rates(device, operation, dtype)
    shape |= {"flops": flops, "size_bytes": size_bytes}
    arrays = {name: np.asarray(value) for name, value in shape.items()}
    sms = prices.device.sms if operation == "attention" else prices.wave_sms
    return prices.seconds(work_of(operation, arrays, dtype, sms))


def collective_s(
    kind: str, size_bytes: Number, device: str | Device, ranks: Number
) -> Number:
    """Seconds of a collective between so many devices of a node.

    kind: all_reduce, all_gather, reduce_scatter or all_to_all; dispatch or combine, of
    tokens to experts by DeepEP. size_bytes: the message of a rank as in
    `costs.link_prices` and nccl-tests, the whole buffer: what all-reduce sums, what
    all-gather ends with, what reduce-scatter and all-to-all begin with; of dispatch and
    combine the copies that a rank sends, one for each device with experts of a token.
    0 for one rank. Raises ValueError for an unknown kind or device.

    >>> [f"{each:.2g}" for each in collective_s("all_reduce", [1e3, 1e9], "h100", 8)]
    ['1.7e-05', '0.0042']
    """
    return kernel_rates(device, kind).seconds(
        np.asarray(size_bytes, dtype=float), ranks
    )


def work_of(
    operation: str, shape: Mapping[str, Number], dtype: str, sms: int
) -> KernelWork:
    """Work of calls on a device with so many multiprocessors (0: not known).

    shape: arrays by name: m, n, k of gemm; batch, sequence, heads, kv_heads and
    head_dim of attention, causal unless it says not, and of delta_rule; else flops and
    size_bytes.
    """
    if operation == "gemm":
        return _product(shape, dtype, sms)
    if operation == "attention":
        return _attention(shape, sms)
    if operation == "delta_rule":
        return _delta_rule(shape, sms)
    return KernelWork(shape["flops"], 1.0, 0.0, apart_bytes=shape["size_bytes"])


def _product(shape, dtype, sms):
    m, n, k = (shape[name] for name in "mnk")
    operand_bytes = BYTES[OPERANDS.get(dtype, dtype)]
    result_bytes = max(operand_bytes, BYTES["bf16"])
    # quantizing reads 16 bits of each value and writes fewer
    quantized_bytes = (operand_bytes < result_bytes) * (operand_bytes + result_bytes)
    tiled = m * n
    if sms:
        # A wave is a tile on each multiprocessor; the last one runs as long as a full
        # one. Libraries take the shape that ends first:
        #   area = min over shapes of ceil(ceil(m / a) ceil(n / b) / sms) sms a b
        tiled = functools.reduce(
            np.minimum,
            (
                np.ceil(np.ceil(m / a) * np.ceil(n / b) / sms) * (sms * a * b * slow)
                for a, b, slow in _TILES
            ),
        )
    return KernelWork(
        area=2.0 * m * n,
        depth=k,
        moved_bytes=operand_bytes * (m * k + k * n) + result_bytes * m * n,
        apart_bytes=quantized_bytes * m * k,
        tiled_area=2.0 * tiled,
    )


def _attention(shape, sms):
    batch, sequence, heads = (shape[name] for name in ("batch", "sequence", "heads"))
    channels = shape["head_dim"]
    tokens = batch * sequence
    area = attention_flops(tokens, sequence, heads, causal=shape.get("causal", True))
    # The last blocks leave multiprocessors idle, on average for the time of one:
    #   t = (blocks + sms) / sms times that of a block
    blocks = batch * heads * np.ceil(sequence / _QUERIES)
    # queries and results of all heads, keys and values of theirs
    values = 2 * tokens * (heads + shape["kv_heads"]) * channels
    return KernelWork(
        area=area * (1 + sms / blocks),
        depth=channels,
        moved_bytes=0.0,
        apart_bytes=BYTES["bf16"] * values,
    )


def _delta_rule(shape, sms):
    channels = shape["head_dim"]
    sequence = shape["sequence"]
    # The chunks of a sequence's head wait for each other's state on one
    # multiprocessor, so that chains run in whole waves:
    #   t = ceil(chains / sms) sequence FLOPs per token / (rate / sms)
    chains = shape["batch"] * shape["heads"]
    in_waves = np.ceil(chains / sms) * sms if sms else chains
    # Three products with the state; scores of queries and keys, both, the inverse's
    # two, and values within a chunk [arXiv 2412.06464, section 3.3]
    flops = 6.0 * channels**2 + 10 * _CHUNK * channels
    heads = shape["heads"] + shape["kv_heads"]  # keys and queries, values and result
    values = 2 * shape["batch"] * sequence * heads * channels
    return KernelWork(
        area=chains * flops,
        depth=sequence,
        moved_bytes=0.0,
        apart_bytes=BYTES["bf16"] * values,
        tiled_area=in_waves * flops,
    )
