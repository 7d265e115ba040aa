"""The commands, one module each, and what they share. May import all of polygon; nothing but `__main__` imports it."""
