"""Which job was this, and what would it take under another plan? Read off a trace."""
