//! The SQL functions of statistics.

use super::Reply;
use crate::pg::fmgr::{Call, Shape, Value};
use crate::pg::notice;
use crate::pg::shmem::Missing;
use crate::statistics;
use pgrx::pg_sys::BuiltinOid::*;

static STATS: Shape<12> = Shape::new([
    (c"executed", INT8OID),
    (c"replayed", INT8OID),
    (c"in_progress", INT8OID),
    (c"mismatch", INT8OID),
    (c"denied", INT8OID),
    (c"taken_over", INT8OID),
    (c"released", INT8OID),
    (c"claims_lost", INT8OID),
    (c"locks_acquired", INT8OID),
    (c"locks_busy", INT8OID),
    (c"locks_lost", INT8OID),
    (c"since", TIMESTAMPTZOID),
]);

/// `idem_stats()`
pub fn stats(call: &Call) -> Reply {
    let mut row = [Value::Null; 12];
    match statistics::read() {
        Ok((counts, since)) => {
            for (column, count) in row.iter_mut().zip(counts) {
                *column = Value::Long(count as i64);
            }
            row[counts.len()] = Value::Moment(since);
        }
        Err(missing) => explain(missing),
    }
    Ok(call.row(&STATS, row))
}

/// `idem_stats_reset()`
pub fn reset(call: &Call) -> Reply {
    if let Err(missing) = statistics::reset() {
        explain(missing);
    }
    Ok(call.value(Value::Void))
}

/// Tells why nothing is counted. Not an error, so that who asks for more gets the rest.
fn explain(missing: Missing) {
    let (message, hint) = match missing {
        #[cfg(any(feature = "pg15", feature = "pg16"))]
        Missing::NotPreloaded => (
            "idem counts nothing, because it was not loaded when the server started",
            "Add idem to shared_preload_libraries and restart the server; PostgreSQL 17 does not need that.",
        ),
        #[cfg(any(feature = "pg17", feature = "pg18"))]
        Missing::NoMemory => (
            "idem counts nothing in this session, because it could not get shared memory",
            "See dynamic_shared_memory_type and the memory of the operating system, then connect again.",
        ),
        Missing::OtherLayout => (
            "idem counts nothing in this session, because the server was started with another version of it",
            "Restart the server.",
        ),
        Missing::Full => (
            "idem does not count in this database, because too many others had been counted before",
            "Restart the server, which forgets those that were dropped.",
        ),
    };
    notice(message, hint);
}
