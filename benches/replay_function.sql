-- What it costs to have any C function in FROM and read two of its columns.
SELECT archived_count, failed_count FROM pg_stat_get_archiver();
