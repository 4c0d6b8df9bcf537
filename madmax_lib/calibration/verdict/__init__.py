"""Is a measured step as fast as it should be, and why not?"""
