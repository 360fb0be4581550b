"""The HTTP client of deliveries and of the SQS adapter: libcurl on the event loop.

It stands below `outbound` and `brokers`, because both use it and neither may import the other.
"""
