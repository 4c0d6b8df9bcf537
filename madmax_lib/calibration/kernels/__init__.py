"""How fast is a kernel or a collective alone, by a table of measured ones?"""
