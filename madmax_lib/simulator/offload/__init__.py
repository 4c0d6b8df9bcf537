"""What may lie on the host or on drives, what does moving it cost, and what fits?"""
