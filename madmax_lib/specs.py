"""Models, devices and clusters, at a public path: see `madmax_lib.catalog.models`."""

from madmax_lib.catalog.models import *
