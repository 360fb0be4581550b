"""Real brokers, started by the tests themselves."""
