from madmax_lib.papers.metis import studies as studies
from madmax_lib.papers.metis.generate import *
from madmax_lib.papers.metis.walk import *
