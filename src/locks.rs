//! Locks: leases with a fence, and locks that end with the transaction.
//!
//! One name is one lock: both kinds take the name's lock in the lock manager, so they exclude each
//! other. A *transaction lock* is nothing but that. A *lease lock* is a row besides, which goes on
//! counting when its taker's transaction has committed and no longer holds the name's lock.
//!
//! | who | holds the name's lock in mode | so that |
//! |---|---|---|
//! | takes, unlocks, or holds it for the transaction | Exclusive | nobody else does anything |
//! | prolongs ([`extend`]) | ShareUpdateExclusive | a guarded transaction goes on |
//! | guards ([`guard`]) | RowShare | nobody takes it before the transaction ends |
//! | looks whether a token holds it | Share, for a moment | nobody writes meanwhile |
//!
//! A transaction that repeats [`take`] gets the same grant: it holds the name's lock exclusively already, and wrote the
//! row itself. (A transaction lock alone does not tell: another's lease, over when it was taken, runs again if the clock is set back.)

use crate::contention::{self, Busy, Seen, Wait, contend};
use crate::leases::{self, Found, Leases, StoredLease};
use crate::pg;
use crate::pg::fmgr::Varlena;
use crate::pg::lock::{self, Mode, Tried};
use crate::pg::table::Access;
use crate::statistics::{Counter, count};
use crate::storage::Key;
use idem_core::error::{Error, LockLost};
use idem_core::lease::{self, Lease, Take};
use idem_core::{Micros, Moment, Token};
use pgrx::pg_sys;

/// A lease lock that was granted.
pub struct Grant {
    pub token: Token,
    pub fence: i64,
    pub lease_end: Moment,
}

/// Who is in the way of a lock: `None`s if it is an open transaction.
pub struct Held {
    pub lease_end: Option<Moment>,
    pub retry_after: Option<Micros>,
    pub holder: Option<Varlena>,
}

/// Takes the lock `name` for `ttl`, or says who has it. Waits up to `wait`.
pub fn take(
    function: pg_sys::Oid,
    name: &Key,
    ttl: Micros,
    holder: Option<Varlena>,
    wait: Wait,
) -> Result<Result<Grant, Held>, Error> {
    let mut seen_holder = None;
    let taken = contend(&name.identity, wait, |tried| {
        let locked = tried != Tried::Busy;
        let leases = Leases::open(function, if locked { Access::Write } else { Access::Read })?;
        let seen = loop {
            let found = leases.find(name)?;
            let now = pg::now();
            let stored = found.as_ref().map(|found| &found.stored.lease);
            let ours = found.as_ref().is_some_and(Found::is_ours);
            match lease::take(stored, || leases::floor(function), now)? {
                Take::Held { lease_end } => match found {
                    Some(Found {
                        stored: StoredLease { lease: Lease { token: Some(token), fence, .. }, .. },
                        ..
                    }) if tried == Tried::HeldBefore && ours => {
                        let answer = Grant { token, fence, lease_end };
                        break Seen::Answer { answer, keep_lock: true };
                    }
                    found => {
                        seen_holder = found.and_then(|found| found.stored.holder);
                        let left = lease_end - now;
                        break Seen::Leased(contention::Lease { end: lease_end, left });
                    }
                },
                Take::Free { fence } if locked => {
                    let (token, lease_end) = (pg::new_token(), now + ttl);
                    let lease = Lease { token: Some(token), fence, expires_at: lease_end };
                    let row = StoredLease { lease, acquired_at: now, ttl, holder };
                    // Unless the row was purged meanwhile: then look again, for the floor.
                    if leases.put(name, &row, found.as_ref())? {
                        pg::force_sync_commit();
                        count(Counter::LocksAcquired);
                        let answer = Grant { token, fence, lease_end };
                        break Seen::Answer { answer, keep_lock: true };
                    }
                }
                Take::Free { .. } => {
                    seen_holder = None;
                    break Seen::Nothing { stale: false };
                }
            }
        };
        leases.close(matches!(seen, Seen::Answer { .. }));
        Ok(seen)
    })?;
    Ok(taken.map_err(|Busy { lease }| {
        count(Counter::LocksBusy);
        Held {
            lease_end: lease.map(|lease| lease.end),
            retry_after: lease.map(|lease| lease.left),
            holder: seen_holder,
        }
    }))
}

/// Takes the lock `name` until the transaction ends. False if somebody else has it and `wait` is over.
pub fn take_for_transaction(function: pg_sys::Oid, name: &Key, wait: Wait) -> Result<bool, Error> {
    let taken = contend(&name.identity, wait, |tried| {
        let leases = Leases::open(function, Access::Read)?;
        let found = leases.find(name)?;
        leases.close(false);
        let now = pg::now();
        // No fence is given.
        let no_floor = || Ok(0);
        let take = lease::take(found.as_ref().map(|found| &found.stored.lease), no_floor, now)?;
        Ok(match (tried, take) {
            (Tried::Taken, Take::Free { .. }) | (Tried::HeldBefore, _) => {
                Seen::Answer { answer: tried, keep_lock: true }
            }
            (Tried::Taken | Tried::Busy, Take::Held { lease_end }) => {
                Seen::Leased(contention::Lease { end: lease_end, left: lease_end - now })
            }
            (Tried::Busy, Take::Free { .. }) => Seen::Nothing { stale: false },
        })
    })?;
    match taken {
        Ok(Tried::Taken) => count(Counter::LocksAcquired),
        Ok(_) => {}
        Err(_) => count(Counter::LocksBusy),
    }
    Ok(taken.is_ok())
}

/// Gives the lock another lease from now on, `ttl` long or as long as its last. Returns its end.
/// ID011 if the token does not hold the lock; a lease that is over is never revived.
pub fn extend(
    function: pg_sys::Oid,
    name: &Key,
    token: Token,
    ttl: Option<Micros>,
) -> Result<Moment, Error> {
    let (leases, found) =
        own_lease(function, name, &token, Mode::ShareUpdateExclusive)?.map_err(Error::LockLost)?;
    let StoredLease { lease, acquired_at, ttl: last, holder } = found.stored;
    let ttl = ttl.unwrap_or(last);
    let expires_at = pg::now() + ttl;
    if expires_at < lease.expires_at {
        lock::wake(name.identity);
    }
    let row = StoredLease { lease: Lease { expires_at, ..lease }, acquired_at, ttl, holder };
    // A purge leaves a row alone whose lease is running.
    leases.put(name, &row, Some(&found))?;
    pg::force_sync_commit();
    leases.close(true);
    Ok(expires_at)
}

/// Frees the lock at COMMIT. False, and nothing changed, if the token does not hold it.
pub fn unlock(function: pg_sys::Oid, name: &Key, token: Token) -> Result<bool, Error> {
    let Ok((leases, found)) = own_lease(function, name, &token, Mode::Exclusive)? else {
        return Ok(false);
    };
    let StoredLease { lease, acquired_at, ttl, .. } = found.stored;
    let lease = Lease { token: None, expires_at: pg::now().min(lease.expires_at), ..lease };
    leases.put(name, &StoredLease { lease, acquired_at, ttl, holder: None }, Some(&found))?;
    leases.close(true);
    Ok(true)
}

/// Has nobody else take the lock before this transaction ends, and returns its fence. ID011 unless
/// the token holds it now.
pub fn guard(function: pg_sys::Oid, name: &Key, token: Token) -> Result<i64, Error> {
    lock::lock(name.identity.key_tag, Mode::RowShare);
    let leases = Leases::open(function, Access::Read)?;
    let row = leases.find(name)?;
    leases.close(false);
    let row = match held(row, &token) {
        // The row may be missed while somebody prolongs the lease: look again without that.
        Err(_) => held(look(function, name)?, &token).map_err(Error::LockLost)?,
        Ok(row) => row,
    };
    Ok(row.stored.lease.fence)
}

/// The row of the name once nobody else is about to change it; waits for that.
fn look(function: pg_sys::Oid, name: &Key) -> Result<Option<Found>, Error> {
    lock::lock(name.identity.key_tag, Mode::Share);
    let leases = Leases::open(function, Access::Read)?;
    let found = leases.find(name)?;
    leases.close(false);
    lock::unlock(name.identity.key_tag, Mode::Share);
    Ok(found)
}

/// The row of the lock that `token` holds, with the name locked in `mode` so that the caller may
/// change it; else why the token does not hold it, with the name not locked. Waits for others.
fn own_lease(
    function: pg_sys::Oid,
    name: &Key,
    token: &Token,
    mode: Mode,
) -> Result<Result<(Leases, Found), LockLost>, Error> {
    if let Err(lost) = held(look(function, name)?, token) {
        return Ok(Err(lost));
    }
    match mode {
        Mode::Exclusive => lock::announce_end(name.identity),
        mode => lock::lock(name.identity.key_tag, mode),
    }
    let leases = Leases::open(function, Access::Write)?;
    match held(leases.find(name)?, token) {
        Ok(row) => Ok(Ok((leases, row))),
        Err(lost) => {
            leases.close(false);
            lock::unlock(name.identity.key_tag, mode);
            Ok(Err(lost))
        }
    }
}

/// The row, if `token` holds the lock now.
fn held(found: Option<Found>, token: &Token) -> Result<Found, LockLost> {
    let lease = found.as_ref().map(|found| found.stored.lease);
    match found {
        Some(found) if lease::holds(lease.as_ref(), token, pg::now()) => Ok(found),
        _ if lease.is_some_and(|lease| lease.token == Some(*token)) => Err(LockLost::Expired),
        _ => Err(LockLost::NotHeld),
    }
}
