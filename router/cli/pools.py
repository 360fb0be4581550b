"""`pools`: changing a pool of the running router, until the next configuration sync."""

import click
import msgspec

from router.cli.connection import connect, in_path, router_options
from router.cli.output import json_option, show_fields, show_json


@click.group(epilog="\b\nExample:  message-router pools set POOL-A --concurrency 5")
def pools() -> None:
    """Change a pool of the running router."""


@pools.command(
    "set",
    epilog="\b\nExamples:  message-router pools set POOL-A --concurrency 5 --rate 600\n"
    "           message-router pools set POOL-A --rate 0",
)
@click.argument("code", metavar="CODE")
@click.option(
    "--concurrency", type=click.IntRange(min=1), metavar="N", help="Deliveries at the same time."
)
@click.option(
    "--rate", type=click.IntRange(min=0), metavar="N", help="Deliveries per minute; 0 for no limit."
)
@router_options
@json_option
def set_pool(code: str, concurrency: int | None, rate: int | None, as_json: bool) -> None:
    """Change a pool at once. The next configuration sync reverts it.

    Open deliveries finish. Messages that wait for the rate limit are subject to the new one.
    """
    if concurrency is None and rate is None:
        raise click.UsageError("give --concurrency, --rate or both")
    order: dict[str, int | None] = {}
    if concurrency is not None:
        order["concurrency"] = concurrency
    if rate is not None:
        order["rateLimitPerMinute"] = rate or None
    with connect() as router:
        stats = router.put(f"/monitoring/pools/{in_path(code)}", msgspec.json.encode(order))
    if as_json:
        show_json(stats)
    else:
        show_fields(stats)
