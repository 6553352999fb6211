"""A step as a value: the named parts of T tokens, built once for a length and run many times."""
