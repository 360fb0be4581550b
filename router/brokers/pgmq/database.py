"""A database with PGMQ, and beside it the schema in which we keep the states of messages (CMD-14).

The schema is that of the PostgreSQL work queue. Without the right to make it, there are no states.
"""

from typing import Final

from router.brokers.postgres.database import PostgresDatabase
from router.brokers.work_queue import Row
from router.ports import QueueRefused

# Tables are ours if their versions are: anybody may have made a schema of that name.
_LOOK: Final = """
SELECT
    to_regnamespace('pgmq') IS NOT NULL AS has_pgmq,
    current_user::text AS role,
    current_database()::text AS database,
    has_database_privilege(current_database(), 'CREATE') AS may_create_schema,
    schema.oid IS NOT NULL AS has_schema,
    coalesce(has_schema_privilege(schema.oid, 'USAGE'), false) AS may_use,
    coalesce(has_schema_privilege(schema.oid, 'CREATE'), false) AS may_create,
    EXISTS (
        SELECT FROM pg_class AS versions JOIN pg_attribute ON attrelid = versions.oid
        WHERE relnamespace = schema.oid AND relname = 'schema_versions' AND attname = 'incarnation'
    ) AS is_ours,
    EXISTS (SELECT FROM pg_class WHERE relnamespace = schema.oid) AS is_used,
    (
        SELECT bool_and(
            has_table_privilege(oid, 'SELECT') AND has_table_privilege(oid, 'INSERT')
            AND has_table_privilege(oid, 'UPDATE') AND has_table_privilege(oid, 'DELETE')
        )
        FROM pg_class WHERE relnamespace = schema.oid AND relkind = 'r'
    ) AS may_write
FROM (SELECT) AS one LEFT JOIN pg_namespace AS schema ON nspname = 'message_router'
"""


class PgmqDatabase(PostgresDatabase):
    """A database whose schema is not ours; that of the states may be beside it."""

    def __init__(self, dsn: str) -> None:
        super().__init__(dsn)
        self.keeps_states = False  # known after `open_states`
        self.problem: str | None = None  # why it keeps none

    async def prepare(self) -> None:
        await self.check_server()

    async def open_states(self, *, may_install: bool, is_new: bool) -> None:
        """Find out whether the states of messages can be kept. Install their tables if need be.

        `is_new`: of a new connection. It looks again, as the tables may be gone.
        """
        if self.keeps_states and not is_new:
            return
        self.keeps_states = False
        (row,) = await self.call(_LOOK)
        if not row["has_pgmq"] or not (row["is_ours"] or may_install):
            return
        self.problem = _problem(row)
        if self.problem is None:
            try:
                await super().prepare()
            except QueueRefused as error:
                self.problem = str(error)
            else:
                self.keeps_states = True


def _problem(row: Row) -> str | None:
    """Return why the tables of the states cannot be used, with the GRANT that helps."""
    role, grant = _quoted(row["role"]), None
    if not row["has_schema"]:
        if not row["may_create_schema"]:
            grant = f"GRANT CREATE ON DATABASE {_quoted(row['database'])} TO {role}"
    elif row["is_ours"]:
        if not (row["may_use"] and row["may_write"]):
            grant = (
                f"GRANT USAGE ON SCHEMA message_router TO {role}; "
                f"GRANT ALL ON ALL TABLES IN SCHEMA message_router TO {role}"
            )
    elif row["is_used"]:
        return "somebody else has made a schema message_router, and it is left as it is"
    elif not (row["may_use"] and row["may_create"]):
        grant = f"GRANT USAGE, CREATE ON SCHEMA message_router TO {role}"
    return None if grant is None else f"the user lacks rights, run: {grant}"


def _quoted(name: str) -> str:
    return '"{}"'.format(name.replace('"', '""'))
