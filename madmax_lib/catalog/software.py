"""What does a training software do by itself: which kernels it has, what it overlaps,
can launch and holds?

The facts stand in `data/software.csv`, each with its source; `like` names the software
whose facts hold where it has none itself. What is not there is assumed to be at its
default. `catalog.software` reads the table.
"""

from dataclasses import dataclass, field

OVERLAPS = ("overlap_tp", "overlap_ep", "overlap_dp")  # which a plan may say too
# open stacks whose configuration `plan_flags` writes, by preference: a search for no
# software in particular takes what one of them launches
STACKS = ("megatron-core", "megatron-bridge", "torchtitan", "deepspeed", "accelerate")
# class of constants of the stacks that are in no table
STRANGER = "stranger"


@dataclass(frozen=True)
class Software:
    """A training software in 16-bit training; bytes are per parameter unless said
    otherwise.
    """

    name: str = "none"
    # whose fitted rates it has: empty for its own, `STRANGER` where nobody knows it
    rates: str = field(default="", repr=False)

    # kernels
    # class of constants: eager, compiled, fused, legacy, deepspeed, nanotron, xla or
    # graph
    kernels: str = "fused"
    forward_kernels: int = 14  # launches of the forward pass of a dense LLaMA layer
    legacy: bool = False  # of 2021: its products are slower than its kernels explain
    unfused_attention: bool = False  # the scores of attention go through memory
    # moved per score then, forward: fused softmax, mask, dropout [arXiv 2205.05198,
    # 4.1]
    score_bytes: float = 10.0
    fused_loss: bool = False  # cross entropy without fp32 logits
    pads_vocabulary: bool = True  # to a size that the products of the head like
    # share of the products that selective recompute repeats; 0: attention's core alone
    selective_products: float = 0.0

    # communication, where a plan does not say
    overlap_tp: bool = False  # of tp, beside the products
    # ring: products in pieces; async: symmetric memory; weight-gradient; user-buffers
    overlap_tp_way: str = "none"
    overlap_ep: bool = False  # exchanges of tokens, beside the work of another batch
    overlap_dp: bool = True  # of gradients, beside the backward pass; FSDP's always is
    gathers_tensorwise: bool = (
        False  # FSDP gathers tensor by tensor, not layer by layer
    )
    reduces_every_micro_batch: bool = (
        False  # a pipeline without ZeRO reduces gradients with every micro-batch
    )
    # ends of a pipeline add up the gradients of a tied table; of others it is left out,
    # being small
    sums_tied: bool = False
    sends_block: bool = (
        False  # pipeline messages stop the host: shapes are sent before tensors
    )
    # the host reads how many tokens come before it launches the products of experts
    counts_on_host: bool = False
    cpu_async: tuple[str, ...] = (
        "ddp",
    )  # of ddp, fsdp: collectives beside which a process on a CPU computes
    gathers_logits: bool = (
        False  # tp ranks gather the logits before the loss, which is then not split
    )
    # tp ranks sum the results of experts token by expert, before they are weighted and
    # added
    sums_rows: bool = False
    send_once: bool = (
        False  # a token goes once to a rank that has several of its experts
    )
    wire_bytes: float = 2.0  # of a gradient in reductions: 4 is fp32

    # what it can launch
    trains: tuple[str, ...] = ("language", "image", "recommendation")  # models
    tensor_parallel: bool = True
    schedules: tuple[str, ...] = (
        "gpipe",
        "1f1b",
        "zero-bubble",
    )  # of pipelines; empty: pp=1 alone
    interleave: bool = True  # several chunks per stage
    zero: tuple[int, ...] = (0, 1, 2, 3)  # 0 is DDP
    zero_under_pipeline: tuple[int, ...] = (0, 1, 2, 3)
    hybrid_shard: bool = True  # ZeRO in groups, with copies across
    memory_budget: bool = False  # torch's partitioner keeps activations within one
    zero_plus_plus: tuple[str, ...] = ("qwz", "hpz", "qgz")
    context: tuple[str, ...] = ("ring", "ulysses")  # empty: cp=1 alone
    expert_placement: tuple[str, ...] = (
        "dp-cp",
        "dp-cp-tp",
    )  # its default first: etp=tp or etp=1; empty: ep=1 alone
    ends_as_layers: bool = (
        False  # embedding and head count as layers when stages are cut
    )
    frees_under_pipeline: bool = (
        True  # FSDP frees weights after the forward pass where pp > 1 too
    )
    refuses: tuple[
        str, ...
        # further choices it does not run: field=value, or a word of `software_rules`
    ] = ()
    unsaid: tuple[
        str, ...
    ] = ()  # choices that its configuration cannot say, which a search does not try

    # what a device holds
    weight_bytes: float = 2.0
    gradient_bytes: float = 4.0
    copy_bytes: float = (
        4.0  # fp32 weights of the optimizer; 0: the weights are fp32 themselves
    )
    moment_bytes: float = 4.0  # of each moment of the optimizer
    cast_bytes: float = 0.0  # copies that compute uses instead of the weights
    accumulator_bytes: float = (
        0.0  # fp32 gradients beside the others, if they are reduced in fp32
    )
    bucket_bytes: float = 0.0  # gradients once more, in DDP's buckets
    temporary_bytes: float = (
        0.0  # while the optimizer runs, per parameter that it updates
    )
    weights_sharded_from: int = 3  # ZeRO stage
    logit_bytes: float = 10.0  # per logit at the loss
    split_logit_bytes: float = (
        0.0  # the same where tp splits the logits; 0: as logit_bytes
    )
    frees_gradients: bool = False  # after an update, so that a first pass finds none
    # per logit where the loss is fused: logits and their gradient in 16 bits, the rest
    # stays in registers [flash-attn cross_entropy]
    fused_logit_bytes: float = 4.0
    # DeepSpeed's: keeps what it sent, two buckets, at most 1e9 gathered weights
    engine: bool = False
    stored_8bit: bool = False  # fp8 products keep their inputs in 8 bits
    keeps: tuple[str, ...] = (
        "masks",
    )  # of dropout; gate of SwiGLU, fp32 norm inputs, gathered inputs, all outputs;
    # under autocast the fp32 stream of residuals and casts of it; logits beside the loss
    stages_by_flops: bool = (
        False  # stages are cut at equal FLOPs, the head's among them
    )

    def __bool__(self):
        """False for `none` and for a stranger: `case.software or usual` takes the usual
        one where nothing is known.
        """
        return self.name != "none" and self.rates != STRANGER
