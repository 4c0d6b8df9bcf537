"""How fast is the hardware? Compute, collectives, groups on links, and the fitted
constants.
"""
