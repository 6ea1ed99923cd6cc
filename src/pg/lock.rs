//! The lock manager: a key's lock, waiting for it with a deadline, sleeping until a lease ends.
//!
//! A key's lock is an advisory lock of the current transaction in a tag space of its own (see
//! `idem_core::identity`). It costs no xid and no WAL, takes part in deadlock detection, is given to
//! a prepared transaction by PREPARE and is gone, whatever happens, when its transaction is.
//!
//! **Owner.** Every lock is taken and given back with `CurrentResourceOwner` set to the current
//! (sub)transaction's. Otherwise it would belong to the portal: when a FETCH from a cursor fails
//! inside a savepoint, the portal's locks go while the savepoint's claims stay.
//!
//! **Deadlines.** PostgreSQL can only give up waiting for a lock by raising an error. So a wait with
//! a deadline runs in an internal subtransaction with `lock_timeout` lowered to the deadline; the
//! error is swallowed if it can only be our own deadline. Every other error (cancel, deadlock, the
//! user's own lock_timeout) goes on to the user once the subtransaction is rolled back.
//!
//! **Sleep and wake.** Whoever holds a key on a lease holds no lock. A waiter takes the *wake* tag in
//! share mode, looks once more, and sleeps on its latch until the lease's end or its deadline.
//! Whoever ends such a lease takes the key's lock with [`announce_end`], which finds the waiters among
//! the holders of the wake tag and sets their latches: they then queue for the key's lock. Whoever makes
//! a lease shorter calls [`wake`] likewise. No wake-up is lost: a waiter that registers later finds the
//! key's lock taken, provided that it asks for that before it looks (see `contention.rs`).

use super::raw::Raw;
use super::trap::{Trapped, in_subtransaction, trap};
use idem_core::Micros;
use idem_core::identity::{Identity, Tag};
use pgrx::pg_sys;
use pgrx::pg_sys::errcodes::PgSqlErrorCode::ERRCODE_LOCK_NOT_AVAILABLE;
use std::panic::resume_unwind;

/// How strongly a key is locked. Who changes its holder excludes everybody; who only prolongs its
/// claim excludes others who do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Holding: claiming, completing, releasing, forgetting; taking and giving back a lock.
    Exclusive = pg_sys::ExclusiveLock as isize,
    /// Looking whether there is something to end or to prolong, before the key is locked for that: nobody changes it
    /// meanwhile, but to others who ask for its [`holder`] it is free.
    ShareRowExclusive = pg_sys::ShareRowExclusiveLock as isize,
    /// Extending.
    ShareUpdateExclusive = pg_sys::ShareUpdateExclusiveLock as isize,
    /// Guarding: beside another guard and beside extending.
    RowShare = pg_sys::RowShareLock as isize,
    /// Looking, while nobody writes. On the wake tag: waiting for a lease to end.
    Share = pg_sys::ShareLock as isize,
}

fn locktag(tag: Tag) -> pg_sys::LOCKTAG {
    pg_sys::LOCKTAG {
        // SAFETY: a plain global, set once when the backend starts.
        locktag_field1: unsafe { pg_sys::MyDatabaseId }.to_u32(),
        locktag_field2: tag.field2,
        locktag_field3: tag.field3,
        locktag_field4: tag.field4,
        locktag_type: pg_sys::LockTagType::LOCKTAG_ADVISORY as u8,
        locktag_lockmethodid: pg_sys::USER_LOCKMETHOD as u8,
    }
}

/// Runs `body`, within a trap, with the current (sub)transaction as the owner of what it takes or gives
/// back. After an error the trap puts the owner back.
pub(super) fn owned_by_transaction<T>(_: Raw, body: impl FnOnce() -> T) -> T {
    // SAFETY: plain globals of this single-threaded backend; the owner put back is still alive,
    // because the call that runs under it is.
    unsafe {
        let before = pg_sys::CurrentResourceOwner;
        pg_sys::CurrentResourceOwner = pg_sys::CurTransactionResourceOwner;
        let value = body();
        pg_sys::CurrentResourceOwner = before;
        value
    }
}

/// What a try for a lock led to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tried {
    /// Somebody else is in the way.
    Busy,
    /// This call took it.
    Taken,
    /// This transaction held it before; it now holds it once more.
    HeldBefore,
}

fn acquire(tag: Tag, mode: Mode, dont_wait: bool) -> Tried {
    let tag = locktag(tag);
    // SAFETY: the tag is valid.
    let result = unsafe {
        trap(|raw| {
            owned_by_transaction(raw, || {
                raw.LockAcquire(&tag, mode as pg_sys::LOCKMODE, false, dont_wait)
            })
        })
    };
    match result {
        pg_sys::LockAcquireResult::LOCKACQUIRE_NOT_AVAIL => Tried::Busy,
        pg_sys::LockAcquireResult::LOCKACQUIRE_OK => Tried::Taken,
        _ => Tried::HeldBefore,
    }
}

/// Takes the lock if that needs no waiting. 53200 if the lock table is full.
pub fn try_lock(tag: Tag, mode: Mode) -> Tried {
    acquire(tag, mode, true)
}

/// Takes the lock, waiting as an UPDATE would: 55P03 after `lock_timeout`, 57014 on cancel or
/// `statement_timeout`, 40P01 on deadlock.
pub fn lock(tag: Tag, mode: Mode) {
    acquire(tag, mode, false);
}

/// A transaction of another backend, or a prepared one: a number that no two have at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    process: i32,
    transaction: u32,
}

/// Which other transaction holds the lock to change what is under the name, and how: in Mode::Exclusive or
/// Mode::ShareUpdateExclusive. Who waits for the lock, looks or guards does not count; nor does one that is over, though
/// its lock may be there for a moment yet.
pub fn holder(tag: Tag) -> Option<(Holder, Mode)> {
    // Conflicts with Exclusive only, of all modes in use.
    if let [holder, ..] = conflicts(tag, pg_sys::RowShareLock)[..] {
        return Some((holder, Mode::Exclusive));
    }
    // Share conflicts with ShareUpdateExclusive and ShareRowExclusive, RowExclusive with the latter (and Share).
    let lookers = conflicts(tag, pg_sys::RowExclusiveLock);
    let mut others = conflicts(tag, pg_sys::ShareLock).into_iter();
    others.find(|other| !lookers.contains(other)).map(|other| (other, Mode::ShareUpdateExclusive))
}

/// The other transactions that hold the lock in a mode that conflicts with this one.
fn conflicts(tag: Tag, mode: u32) -> Vec<Holder> {
    let tag = locktag(tag);
    // SAFETY: the tag is valid; the array is palloc'd and has as many valid entries as are counted.
    unsafe {
        let mut count = 0;
        let found = pg_sys::GetLockConflicts(&tag, mode as pg_sys::LOCKMODE, &mut count);
        let holders = (0..count as usize).map(|i| holder_of(*found.add(i))).collect();
        pg_sys::pfree(found.cast());
        holders
    }
}

/// Gives back a lock taken in the same call.
pub fn unlock(tag: Tag, mode: Mode) {
    let tag = locktag(tag);
    // SAFETY: the tag is valid; giving back what is not held is a WARNING and returns false.
    unsafe {
        trap(|raw| {
            owned_by_transaction(raw, || raw.LockRelease(&tag, mode as pg_sys::LOCKMODE, false))
        })
    };
}

/// Restores `LockTimeout` when dropped: a plain assignment, safe during unwinding.
struct LockTimeoutGuard(i32);

impl Drop for LockTimeoutGuard {
    fn drop(&mut self) {
        // SAFETY: a plain global of this single-threaded backend.
        unsafe { pg_sys::LockTimeout = self.0 };
    }
}

/// Takes the lock, waiting for `patience` (above 0) at the most; says whether it was got. Errors as
/// [`lock`], `lock_timeout` only if it is shorter than `patience`.
pub fn lock_within(tag: Tag, mode: Mode, patience: Micros) -> bool {
    let millis = i32::try_from(whole_millis(patience)).unwrap_or(i32::MAX);
    // SAFETY: a plain global of this single-threaded backend.
    let users = unsafe { pg_sys::LockTimeout };
    let ours = users == 0 || millis <= users;
    let outcome = in_subtransaction(|| {
        let _guard = LockTimeoutGuard(users);
        if ours {
            // SAFETY: a plain global of this single-threaded backend, read when the wait begins.
            unsafe { pg_sys::LockTimeout = millis };
        }
        lock(tag, mode);
    });
    match outcome {
        Ok(()) => true,
        Err(payload) => match payload.downcast_ref::<Trapped>() {
            Some(error) if ours && error.sqlstate() == ERRCODE_LOCK_NOT_AVAILABLE as i32 => false,
            _ => resume_unwind(payload),
        },
    }
}

/// Takes a name's lock to end a lease before its time, waiting as [`lock`] does, and has those who
/// sleep until that time queue for the lock.
pub fn announce_end(identity: Identity) {
    lock(identity.key_tag, Mode::Exclusive);
    wake(identity);
}

/// Sets the latch of everybody who sleeps until the end of the lease of this name. The name's lock is
/// held.
pub fn wake(identity: Identity) {
    let tag = locktag(identity.wake_tag);
    // SAFETY: GetLockConflicts returns a palloc'd array that ends with an invalid entry; a PGPROC is
    // in shared memory for ever, and setting the latch of one that has changed hands does no harm.
    unsafe {
        let mut count = 0;
        let waiters =
            pg_sys::GetLockConflicts(&tag, pg_sys::ExclusiveLock as pg_sys::LOCKMODE, &mut count);
        for i in 0..count as usize {
            let proc = proc_of(*waiters.add(i));
            if !proc.is_null() {
                pg_sys::SetLatch(&raw mut (*proc).procLatch);
            }
        }
    }
}

fn holder_of(id: pg_sys::VirtualTransactionId) -> Holder {
    #[cfg(any(feature = "pg15", feature = "pg16"))]
    let process = id.backendId;
    #[cfg(any(feature = "pg17", feature = "pg18"))]
    let process = id.procNumber;
    Holder { process, transaction: id.localTransactionId }
}

#[cfg(any(feature = "pg15", feature = "pg16"))]
unsafe fn proc_of(id: pg_sys::VirtualTransactionId) -> *mut pg_sys::PGPROC {
    unsafe extern "C-unwind" {
        // storage/sinvaladt.h, which pgrx's bindings leave out; it raises nothing.
        fn BackendIdGetProc(backend: std::ffi::c_int) -> *mut pg_sys::PGPROC;
    }
    // SAFETY: any number is allowed; NULL for one that is no backend's.
    unsafe { BackendIdGetProc(id.backendId) }
}

#[cfg(any(feature = "pg17", feature = "pg18"))]
unsafe fn proc_of(id: pg_sys::VirtualTransactionId) -> *mut pg_sys::PGPROC {
    // SAFETY: any number is allowed; NULL for one that is no backend's.
    unsafe { pg_sys::ProcNumberGetProc(id.procNumber) }
}

/// Sleeps until the latch is set or `length` (above 0) is over; cancel and timeouts act.
pub fn sleep(length: Micros) {
    let events = pg_sys::WL_LATCH_SET | pg_sys::WL_TIMEOUT | pg_sys::WL_EXIT_ON_PM_DEATH;
    // SAFETY: MyLatch is this backend's own latch.
    unsafe {
        pg_sys::WaitLatch(pg_sys::MyLatch, events as i32, whole_millis(length), wait_event());
        pg_sys::ResetLatch(pg_sys::MyLatch);
    }
    super::check_for_interrupts();
}

/// What `pg_stat_activity` shows of a backend that sleeps: `Extension` and, from 17 on, `IdemLease`.
fn wait_event() -> u32 {
    #[cfg(any(feature = "pg17", feature = "pg18"))]
    {
        static EVENT: std::sync::OnceLock<u32> = std::sync::OnceLock::new();
        // SAFETY: the name is a valid C string, copied by the callee.
        *EVENT.get_or_init(|| unsafe { pg_sys::WaitEventExtensionNew(c"IdemLease".as_ptr()) })
    }
    #[cfg(any(feature = "pg15", feature = "pg16"))]
    pg_sys::PG_WAIT_EXTENSION
}

/// Rounds up, so that a sleep never ends before what it waits for; at most a day at a time, which
/// the callers' loops repeat.
fn whole_millis(length: Micros) -> i64 {
    (length / 1_000).saturating_add(i64::from(length % 1_000 > 0)).clamp(1, 86_400_000)
}
