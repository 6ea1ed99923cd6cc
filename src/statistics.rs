//! What is counted, and when: the numbers of `idem_stats()`.
//!
//! What changes something counts when it commits: a completion that is rolled back, by a savepoint
//! too, never happened. PREPARE TRANSACTION counts as commit, because the connection that prepares has
//! forgotten what it counted when another decides. What was only answered, or refused with an error,
//! has happened whatever becomes of the transaction, and counts at once.

use crate::pg::shmem::{self, COUNTERS, Missing};
use crate::pg::xact;
use idem_core::Moment;
use idem_core::error::Error;

/// The columns of `idem_stats()`, in order (see sql/idem.sql).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counter {
    /// A key was completed.
    Executed,
    /// A caller got the result of a completed key.
    Replayed,
    InProgress,
    Mismatch,
    Denied,
    /// A claim was made whose predecessor's lease had run out.
    TakenOver,
    Released,
    /// ID003 was raised.
    ClaimsLost,
    /// A lock was granted, on a lease or for a transaction.
    LocksAcquired,
    LocksBusy,
    /// ID011 was raised.
    LocksLost,
}

const _: () = assert!(Counter::LocksLost as usize + 1 == COUNTERS);

impl Counter {
    /// Whether it counts changes, which a rollback undoes.
    fn counts_changes(self) -> bool {
        use Counter::*;
        matches!(self, Executed | TakenOver | Released | LocksAcquired)
    }
}

/// Counts one more, if anything is counted here. Never fails.
pub fn count(counter: Counter) {
    if let Ok(database) = shmem::database() {
        match counter.counts_changes() {
            true => xact::count(counter as usize),
            false => database.count(counter as usize),
        }
    }
}

/// Counts an error that is about to be raised.
pub fn count_error(error: &Error) {
    match error {
        Error::ClaimLost(_) => count(Counter::ClaimsLost),
        Error::LockLost(_) => count(Counter::LocksLost),
        Error::InProgressHere => count(Counter::InProgress),
        _ => {}
    }
}

/// The counters of this database, and since when they count; or why nothing is counted.
pub fn read() -> Result<([u64; COUNTERS], Moment), Missing> {
    shmem::database().map(shmem::Database::read)
}

/// Has the counters of this database start from 0.
pub fn reset() -> Result<(), Missing> {
    shmem::database().map(shmem::Database::reset)
}
