"""The chart grammar: what all pictures of the workbench are made of.

A picture is a function from a table to Axes: it draws shapes (`bars`, `lines`,
`blocks`, ...) on `new_axes` and returns `finish(ax, table, title, ...)`, which keeps
the table, so that a figure is saved with its data.
"""

from madmax_lib.view.drawing.axes import *
from madmax_lib.view.drawing.shapes import *
from madmax_lib.view.drawing.style import *
from madmax_lib.view.words import *
