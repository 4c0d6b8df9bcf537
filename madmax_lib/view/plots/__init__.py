"""How does a table look? One function per picture."""
