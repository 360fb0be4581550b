"""Fuzzing: a coverage-guided search for bytes that a parser does not stand (`./dev fuzz`)."""
