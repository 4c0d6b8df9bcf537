"""How far off is a prediction, on what the fit has not seen?"""
