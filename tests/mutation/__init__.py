"""Mutation testing (`./dev mutate`): small bugs are put into the code; the tests must notice."""
