//! Catching a PostgreSQL error with nothing of it lost.
//!
//! pgrx's bindings catch errors too, but keep of them what its own error type has: an SQLSTATE of an
//! unknown class becomes XX000, and context, constraint, table and the server-log detail of a
//! deadlock are dropped. That is good enough for errors of PostgreSQL's own that nobody needs to
//! tell apart. For a user's function, and for waiting on a lock, the error must arrive as it was raised:
//! [`trap`] keeps the whole `ErrorData`, which travels as a panic ([`Trapped`]) and is thrown again by
//! `fmgr`'s guard. It is cheaper, too: one stands around many calls (see `raw.rs`).

use super::raw::Raw;
use pgrx::pg_sys;
use std::mem::{MaybeUninit, needs_drop};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// A PostgreSQL error on its way to the user, as the payload of a panic.
pub struct Trapped(pub *mut pg_sys::ErrorData);

// SAFETY: a panic's payload must be Send; a backend has one thread.
unsafe impl Send for Trapped {}

impl Trapped {
    /// Its SQLSTATE, packed as in elog.h.
    pub fn sqlstate(&self) -> i32 {
        // SAFETY: the copy lives in the memory context of the call that trapped it.
        unsafe { (*self.0).sqlerrcode }
    }
}

/// Runs `body`; an error that PostgreSQL raises in it becomes a panic with [`Trapped`] as payload.
///
/// # Safety
/// `body` keeps to the rule at the head of `raw.rs`: it owns nothing that would have to be dropped, and
/// does not panic.
pub unsafe fn trap<T, F: FnOnce(Raw) -> T>(body: F) -> T {
    const { assert!(!needs_drop::<F>() && !needs_drop::<T>(), "a longjmp would drop nothing") };
    // SAFETY: this is PG_TRY: the exception stack points to a frame that stays alive while `body`
    // runs, and is put back on both ways out. After an error, the copy is made in the caller's memory
    // context and the error state is flushed, as PL/pgSQL does. The resource owner is what it was:
    // `body` may have changed it.
    let error = unsafe {
        let context = pg_sys::CurrentMemoryContext;
        let owner = pg_sys::CurrentResourceOwner;
        let exception_stack = pg_sys::PG_exception_stack;
        let context_stack = pg_sys::error_context_stack;
        let mut value = MaybeUninit::uninit();
        let jumped = cee_scape::call_with_sigsetjmp(false, |jump| {
            pg_sys::PG_exception_stack = std::ptr::from_ref(jump).cast_mut().cast();
            value.write(body(Raw::within_trap()));
            0
        });
        pg_sys::PG_exception_stack = exception_stack;
        pg_sys::error_context_stack = context_stack;
        if jumped == 0 {
            return value.assume_init();
        }
        pg_sys::MemoryContextSwitchTo(context);
        pg_sys::CurrentResourceOwner = owner;
        let error = pg_sys::CopyErrorData();
        pg_sys::FlushErrorState();
        error
    };
    // Not panic_any: the panic hook has nothing to report of an error that is the user's.
    resume_unwind(Box::new(Trapped(error)))
}

/// Runs `body` in a subtransaction of its own. If it panics, which errors of PostgreSQL's do too, the
/// subtransaction is rolled back, and with it whatever PostgreSQL holds for it; the payload is returned.
pub fn in_subtransaction<T>(body: impl FnOnce() -> T) -> std::thread::Result<T> {
    // SAFETY: the pattern of PL/pgSQL's exception blocks: begin a subtransaction, come back to the
    // caller's memory context, and at the end release or roll back, then restore context and owner.
    unsafe {
        let (context, owner) = (pg_sys::CurrentMemoryContext, pg_sys::CurrentResourceOwner);
        pg_sys::BeginInternalSubTransaction(std::ptr::null());
        pg_sys::MemoryContextSwitchTo(context);
        let outcome = catch_unwind(AssertUnwindSafe(body));
        if outcome.is_ok() {
            pg_sys::ReleaseCurrentSubTransaction();
        } else {
            pg_sys::MemoryContextSwitchTo(context);
            pg_sys::RollbackAndReleaseCurrentSubTransaction();
        }
        pg_sys::MemoryContextSwitchTo(context);
        pg_sys::CurrentResourceOwner = owner;
        outcome
    }
}
