from madmax_lib.catalog.data_files import *
from madmax_lib.catalog.datasets import (
    PROJECT as PROJECT,
    SHIPPED as SHIPPED,
    dataset as dataset,
    local_data as local_data,
)
from madmax_lib.catalog.flops import conventions as conventions, flops as flops
from madmax_lib.catalog.hardware import (
    Cluster as Cluster,
    Device as Device,
    Host as Host,
    Link as Link,
)
from madmax_lib.catalog.kernel_rates import OPERANDS as OPERANDS
from madmax_lib.catalog.listing import clusters as clusters, devices as devices
from madmax_lib.catalog.models import (
    DLRM as DLRM,
    Model as Model,
    Transformer as Transformer,
)
from madmax_lib.catalog.software import STRANGER as STRANGER, Software as Software
from madmax_lib.catalog.tables import *
