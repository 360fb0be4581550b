"""`explain`: why is it not delivered now?"""

import click

from router.cli.connection import connect, router_options
from router.cli.output import json_option, plain, show_json


@click.command(
    epilog="\b\nExamples:  message-router explain 0HZXEQ5Y8JY5Z\n"
    "           message-router explain --group order-12345 --pool POOL-A\n"
    "           message-router explain --target https://svc/api/process"
)
@click.argument("message", required=False)
@click.option("--group", metavar="GROUP", help="Explain a message group.")
@click.option("--pool", metavar="CODE", help="The group's pool. Default: DEFAULT-POOL.")
@click.option("--target", metavar="URL", help="Explain everything sent to this URL's origin.")
@router_options
@json_option
def explain(
    message: str | None, group: str | None, pool: str | None, target: str | None, as_json: bool
) -> None:
    """Explain why a message, a group or a target is waiting."""
    if sum(map(bool, (message, group, target))) != 1:
        raise click.UsageError("ask about one thing: a MESSAGE, --group (with --pool) or --target")
    if pool and not group:
        raise click.UsageError("--pool goes with --group")
    query = {"message": message, "group": group, "pool": pool, "target": target}
    with connect() as router:
        found = router.get("/monitoring/explain", query)
    if as_json:
        show_json(found)
        return
    click.secho(plain(found.get("state")), bold=True, nl=False)
    click.echo(f"  {plain(found.get('text'))}")
    for note in found.get("notes", []):
        click.echo(f"  {plain(note)}")
