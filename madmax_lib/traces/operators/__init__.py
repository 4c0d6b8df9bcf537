"""What is each operator's share? Nesting, FLOPs, roofs, memory."""
