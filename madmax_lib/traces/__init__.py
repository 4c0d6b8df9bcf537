"""Reading, analysing, comparing and writing profiler traces."""
