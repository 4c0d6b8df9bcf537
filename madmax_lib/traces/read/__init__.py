"""How do trace files become a Timeline? Found, decoded, repaired, cached, many at once."""
