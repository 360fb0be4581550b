"""Runs tasks as local processes (CMD-8)."""
