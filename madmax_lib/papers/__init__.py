"""The published models of other papers, each exactly as its paper or public release has it, on the shared engine."""
