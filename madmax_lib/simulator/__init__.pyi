from madmax_lib.catalog.kernel_rates import kernel_rates as kernel_rates
from madmax_lib.catalog.measured_collectives import (
    MeasuredCollectives as MeasuredCollectives,
)
from madmax_lib.plan.case import Case as Case
from madmax_lib.simulator.estimate import estimate as estimate
from madmax_lib.simulator.layers.ops import BYTES as BYTES
from madmax_lib.simulator.memory.memory import (
    by_phase as by_phase,
    memory as memory,
    peak_bytes as peak_bytes,
    usable_bytes as usable_bytes,
)
from madmax_lib.simulator.memory.snapshot import export_snapshot as export_snapshot
from madmax_lib.simulator.offload.fits import (
    fits as fits,
    largest_model as largest_model,
)
from madmax_lib.simulator.offload.placement import (
    METHODS as METHODS,
    Policy as Policy,
)
from madmax_lib.simulator.parts import (
    attention_s as attention_s,
    collective_s as collective_s,
    kernel_s as kernel_s,
    product_s as product_s,
)
from madmax_lib.simulator.power import step_energy as step_energy
from madmax_lib.simulator.rates.compute import distinct_bins as distinct_bins
from madmax_lib.simulator.rates.parameters import (
    Parameters as Parameters,
    bounds as bounds,
    load as load,
    save as save,
    shipped as shipped,
)
from madmax_lib.simulator.simulate import simulate as simulate
from madmax_lib.simulator.steady.step_time import PARTS as PARTS, step_time as step_time
from madmax_lib.simulator.uncertainty import (
    constant_index as constant_index,
    width_of as width_of,
)
