"""What each kind of work of a step waits for and hides under: told once, for both forms.

The event engine issues work by these rules, op by op; the steady form evaluates them
for arrays of plans. Compute itself runs in order on its stream; all that is listed here
runs beside it, as far as a share of its seconds says:

    exposed = T_work - min(share T_work, T_compute under which it hides)

Keys and values of a ring are sent once those before have arrived, and hide under
attention to the keys that are there; exchanges of looked-up rows hide under nothing.
"""

from functools import cached_property

import numpy as np

from madmax_lib.plan import Plans
from madmax_lib.simulator.costs.inputs import SoftwareTraits
from madmax_lib.simulator.rates.compute import Number
from madmax_lib.simulator.rates.parameters import Parameters


class Overlap:
    """Shares of work that hides, and what decides them, for steps of a plan and a
    software; arrays where they are many.
    """

    plan: Plans
    traits: SoftwareTraits
    parameters: Parameters

    def hidden_share(self, group: str) -> Number:
        """Share of a block's collectives of a group that runs beside compute of the
        block or its layer.

        Those inside an expert that tp splits (etp) do not: its products need all tokens
        at once.
        """
        if group == "tp":
            return self.tensor_share
        return self.expert_share if group == "ep" else 0.0

    @cached_property
    def tensor_share(self) -> Number:
        """Share of tensor parallelism, issued with its block: collectives of a tile run
        beside the products of other tiles.
        """
        hidden = self.traits.hides_tp.constant(self.parameters, "tp_hidden")
        return self.traits.overlap_tp * hidden

    @cached_property
    def expert_share(self) -> Number:
        """Share of the exchanges of tokens, issued with their block: they run beside all
        compute of the layer, of another micro-batch.
        """
        hidden = self.traits.stack.constant(self.parameters, "ep_hidden")
        return self.traits.hides_ep * hidden

    @cached_property
    def gathers_late(self) -> bool | np.ndarray:
        """Plans whose ZeRO-3 gathers nothing ahead; those of others are issued when the
        compute `prefetch` units before begins, and hide under these.
        """
        traits = self.traits
        waits = (traits.tensorwise > 0) | (traits.fsdp_blocks > 0)
        return (self.plan.prefetch == 0) | waits

    @cached_property
    def reduces_each(self) -> bool | np.ndarray:
        """Plans whose micro-batches each reduce their gradients: by ZeRO-2 without pipeline, by
        some pipelines without ZeRO.
        """
        zero = self.plan.zero
        pp = self.plan.pp
        by_software = (zero == 0) & (pp > 1) & (self.traits.reduces_each > 0)
        return ((zero == 2) & (pp == 1)) | by_software

    @cached_property
    def sharded_buckets(self) -> bool | np.ndarray:
        """Plans whose ZeRO-3 reduces gradients in buckets, as DeepSpeed does; after late
        gathers, or in a pipeline, by layer.
        """
        p = self.plan
        is_engine = (self.traits.buckets > 0) & (p.zero == 3) & (p.pp == 1)
        return is_engine & np.logical_not(self.gathers_late)

    @cached_property
    def hides_reductions(self) -> bool | np.ndarray:
        """Plans whose reductions, issued when the gradients exist that fill a bucket, run
        beside the rest of the backward pass: as the plan or its software says, those of
        ZeRO-3 on a GPU always.
        """
        sharded = self.plan.zero >= 3
        on_gpu = self.traits.on_host == 0
        return (self.traits.hides_dp > 0) | (sharded & on_gpu)

    @cached_property
    def hides_messages(self) -> bool | np.ndarray:
        """Plans whose messages, issued when a pass has computed, travel under passes of
        other micro-batches.
        """
        stops = (self.traits.blocking_sends > 0) | (self.traits.rendezvous_sends > 0)
        return np.logical_not(stops)

    @cached_property
    def launches_ahead(self) -> Number:
        """1 where the host issues kernels at once, under all that is queued on the
        device; 0 on a CPU.
        """
        return 1 - self.traits.on_host

    @cached_property
    def splits_backward(self) -> Number:
        """1 where wgrad is computed later than dgrad, of most micro-batches."""
        p = self.plan
        return p.defers_weights * (p.schedule != "dualpipev") + 0.0
