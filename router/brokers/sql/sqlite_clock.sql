-- Which file this is, and what its clock goes by. The statements that write run once in each boot.

-- name: file
SELECT incarnation, boot_id, clock_offset FROM queue_file;

-- name: last_change
-- The latest instant that the clock before has surely seen.
SELECT (SELECT at FROM queue_changes ORDER BY id DESC LIMIT 1);

-- name: cut_progress
-- No delay is longer than the longest, no lease longer than it was asked for, nothing is finished in
-- the future. In SQLite, min(NULL, x) is NULL.
UPDATE queue_progress
SET run_after = min(run_after - :ahead, :now + :longest_delay),
    lease_until = min(lease_until - :ahead, :now + coalesce(
        (SELECT coalesce(lease, look_at - at) FROM queue_changes WHERE id = lease_token),
        :longest_delay
    )),
    finished_at = min(finished_at - :ahead, :now)
WHERE :ahead > 0 OR finished_at > :now OR run_after IS NOT NULL OR lease_until IS NOT NULL;

-- name: cut_changes
UPDATE queue_changes
SET at = min(at - :ahead, :now),
    look_at = min(look_at - :ahead, :now + coalesce(lease, look_at - at)),
    prune_from = min(prune_from - :ahead, :now)
WHERE :ahead > 0 OR at > :now OR prune_from > :now OR look_at IS NOT NULL;

-- name: anchor
UPDATE queue_file SET boot_id = :boot_id, clock_offset = :offset;
