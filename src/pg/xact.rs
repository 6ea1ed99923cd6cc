//! The claims of the current transaction, and what it counted, kept in step with it.
//!
//! PostgreSQL tells of the end of each transaction and subtransaction through callbacks; they drive
//! the journal in `idem_core::held`. At the end of a transaction with unfinished claims the
//! pre-commit and pre-prepare callbacks raise ID007; they write nothing.
//!
//! The callbacks are registered with the first claim and never removed. PostgreSQL calls the last
//! registered first, so one that another extension registers after that (for instance postgres_fdw
//! when it is first used) may already have committed remotely when ID007 is raised. Counts have
//! callbacks of their own: a lock that is counted must not decide where those of the claims stand.

use super::fmgr::guarded;
use super::raw::quiet::GetCurrentSubTransactionId;
use super::shmem::{self, COUNTERS};
use idem_core::error::Error;
use idem_core::held::{Claim, End, Held};
use idem_core::identity::Identity;
use idem_core::tally::Tally;
use pgrx::pg_sys;
use std::cell::RefCell;
use std::ffi::c_void;

thread_local! {
    static HELD: RefCell<Option<Held>> = const { RefCell::new(None) };
    static COUNTED: RefCell<Option<Tally<COUNTERS>>> = const { RefCell::new(None) };
}

/// The newest claim of this transaction on the key, and how it ended if it did.
pub fn latest(identity: &Identity) -> Option<(Claim, Option<End>)> {
    HELD.with_borrow(|held| {
        let (claim, end) = held.as_ref()?.latest(identity)?;
        Some((claim.clone(), end))
    })
}

/// The open claim of this transaction on the key.
pub fn open(identity: &Identity) -> Option<Claim> {
    match latest(identity) {
        Some((claim, None)) => Some(claim),
        _ => None,
    }
}

/// Remembers a claim just made by the current subtransaction.
pub fn claim(claim: Claim) {
    if HELD.with_borrow(Option::is_none) {
        // SAFETY: the callbacks are functions of this library, which is never unloaded.
        unsafe {
            pg_sys::RegisterXactCallback(Some(at_transaction_end), std::ptr::null_mut());
            pg_sys::RegisterSubXactCallback(Some(at_subtransaction_end), std::ptr::null_mut());
        }
        HELD.set(Some(Held::default()));
    }
    let sub = GetCurrentSubTransactionId();
    with_held(|held| held.claim(claim, sub));
}

/// Marks this transaction's open claim on the key, if there is one, as ended.
pub fn end(identity: &Identity, end: End) {
    let sub = GetCurrentSubTransactionId();
    with_held(|held| held.end(identity, end, sub));
}

fn with_held(body: impl FnOnce(&mut Held)) {
    HELD.with_borrow_mut(|held| {
        if let Some(held) = held {
            body(held);
        }
    });
}

unsafe extern "C-unwind" fn at_transaction_end(event: pg_sys::XactEvent::Type, _: *mut c_void) {
    // SAFETY: PostgreSQL calls this; the frame owns nothing.
    unsafe {
        guarded(|| {
            use pg_sys::XactEvent::*;
            match event {
                XACT_EVENT_PRE_COMMIT | XACT_EVENT_PRE_PREPARE => refuse_unfinished()?,
                XACT_EVENT_COMMIT | XACT_EVENT_ABORT | XACT_EVENT_PREPARE => with_held(Held::clear),
                _ => {}
            }
            Ok(())
        })
    }
}

/// ID007 if a claim of this transaction would be lost.
fn refuse_unfinished() -> Result<(), Error> {
    let mut claims = 0;
    with_held(|held| claims = held.unfinished());
    if claims > 0 {
        return Err(Error::ClaimOpen { claims, autocommit: is_autocommit() });
    }
    Ok(())
}

/// Whether the transaction is that of the current statement alone.
pub fn is_autocommit() -> bool {
    // SAFETY: reads the state of the current transaction.
    unsafe { !pg_sys::IsTransactionBlock() }
}

unsafe extern "C-unwind" fn at_subtransaction_end(
    event: pg_sys::SubXactEvent::Type,
    sub: pg_sys::SubTransactionId,
    parent: pg_sys::SubTransactionId,
    _: *mut c_void,
) {
    // SAFETY: PostgreSQL calls this; the frame owns nothing.
    unsafe {
        guarded(|| {
            use pg_sys::SubXactEvent::*;
            match event {
                SUBXACT_EVENT_COMMIT_SUB => with_held(|held| held.subcommit(sub, parent)),
                SUBXACT_EVENT_ABORT_SUB => with_held(|held| held.subabort(sub)),
                _ => {}
            }
            Ok(())
        })
    }
}

/// Counts one more if the current subtransaction and those around it commit.
pub fn count(counter: usize) {
    if COUNTED.with_borrow(Option::is_none) {
        // SAFETY: the callbacks are functions of this library, which is never unloaded.
        unsafe {
            pg_sys::RegisterXactCallback(Some(count_at_transaction_end), std::ptr::null_mut());
            pg_sys::RegisterSubXactCallback(
                Some(count_at_subtransaction_end),
                std::ptr::null_mut(),
            );
        }
        COUNTED.set(Some(Tally::default()));
    }
    let sub = GetCurrentSubTransactionId();
    with_counted(|counted| counted.count(counter, sub));
}

fn with_counted(body: impl FnOnce(&mut Tally<COUNTERS>)) {
    COUNTED.with_borrow_mut(|counted| {
        if let Some(counted) = counted {
            body(counted);
        }
    });
}

/// After a commit nothing may fail, and nothing here does: it only adds.
unsafe extern "C-unwind" fn count_at_transaction_end(
    event: pg_sys::XactEvent::Type,
    _: *mut c_void,
) {
    use pg_sys::XactEvent::*;
    match event {
        XACT_EVENT_COMMIT | XACT_EVENT_PREPARE => with_counted(|counted| {
            if let Some(counts) = counted.take() {
                shmem::add(&counts);
            }
        }),
        XACT_EVENT_ABORT => with_counted(|counted| {
            counted.take();
        }),
        _ => {}
    }
}

unsafe extern "C-unwind" fn count_at_subtransaction_end(
    event: pg_sys::SubXactEvent::Type,
    sub: pg_sys::SubTransactionId,
    parent: pg_sys::SubTransactionId,
    _: *mut c_void,
) {
    use pg_sys::SubXactEvent::*;
    match event {
        SUBXACT_EVENT_COMMIT_SUB => with_counted(|counted| counted.subcommit(sub, parent)),
        SUBXACT_EVENT_ABORT_SUB => with_counted(|counted| counted.subabort(sub)),
        _ => {}
    }
}
