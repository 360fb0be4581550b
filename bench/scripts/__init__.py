"""What a user would write instead of running a router: references of the benchmark.

Each takes a batch from the queue, delivers its groups side by side and each group in order, and
acknowledges what was accepted. No retries, no limits, no metrics: the least that does the job.
"""
