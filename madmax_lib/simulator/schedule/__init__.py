"""In which order does a step run on streams? Passes, schedules, sharding, staging, the
engine.
"""
