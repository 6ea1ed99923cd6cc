//! Everything that talks to PostgreSQL, and all the `unsafe` there is.
//!
//! - [`fmgr`]: SQL function calls: arguments, results, errors
//! - [`user_function`]: calling functions of users
//! - [`json`]: reading jsonb
//! - [`lock`]: the lock manager: taking, waiting for and giving back a key's lock; sleeping and waking
//! - [`trap`]: catching an error whole, undoing what failed
//! - [`raw`]: the C functions of the hot path, several within one trap
//! - [`memory`]: memory that outlives a session and that others can read
//! - [`shmem`]: counters that all connections share
//! - [`table`]: reading and writing the extension's tables without SQL
//! - [`truncate`]: emptying one of them as a whole
//! - [`xact`]: the claims and counts of the current transaction, kept in step with commit, rollback, savepoints
//!
//! Two rules hold in all of them. A PostgreSQL error arrives as a Rust panic (pgrx or
//! [`trap`] catches the longjmp), so nothing may be dropped by it that calls PostgreSQL again: what must be given back is
//! given back explicitly on success and left to the transaction's abort otherwise. And no `RefCell`
//! borrow is held across a call into PostgreSQL, which may call us back.

pub mod fmgr;
pub mod json;
pub mod lock;
pub mod memory;
pub mod raw;
pub mod shmem;
pub mod table;
pub mod trap;
pub mod truncate;
pub mod user_function;
pub mod xact;

use idem_core::{Micros, Moment, Token};
use pgrx::pg_sys;
use std::borrow::Cow;
use std::cell::Cell;
use std::ffi::CStr;

/// The server's clock, as `clock_timestamp()`.
pub fn now() -> Moment {
    #[cfg(feature = "test-clock")]
    if let Some(moment) = crate::settings::test_clock() {
        return moment;
    }
    raw::quiet::GetCurrentTimestamp()
}

/// Random bytes for this many tokens are fetched at once: asking for 16 bytes costs as much as asking for some hundred, and
/// was a fifth of a fresh `idem_begin`.
const TOKENS_AT_ONCE: usize = 64;

thread_local! {
    /// Random bytes for the next tokens. A backend fills its own after it was forked, so no two share them.
    static RANDOM: [Cell<Token>; TOKENS_AT_ONCE] = const { [const { Cell::new([0; 16]) }; TOKENS_AT_ONCE] };
    /// How many of them are left.
    static LEFT: Cell<usize> = const { Cell::new(0) };
}

/// A new random token.
pub fn new_token() -> Token {
    if LEFT.get() == 0 {
        let mut fresh = [[0; 16]; TOKENS_AT_ONCE];
        // SAFETY: the buffer is valid for its size.
        let ok =
            unsafe { pg_sys::pg_strong_random(fresh.as_mut_ptr().cast(), size_of_val(&fresh)) };
        // A token that others could guess would be worse than an error.
        assert!(ok, "could not generate random bytes");
        RANDOM.with(|tokens| tokens.iter().zip(fresh).for_each(|(token, fresh)| token.set(fresh)));
        LEFT.set(TOKENS_AT_ONCE);
    }
    let left = LEFT.get() - 1;
    LEFT.set(left);
    idem_core::identity::token_from_random(RANDOM.with(|tokens| tokens[left].take()))
}

/// Lets cancel, termination and timeouts act here.
pub fn check_for_interrupts() {
    pgrx::check_for_interrupts!();
}

/// Pauses for less than a millisecond; cancel acts afterwards.
pub fn pause(length: Micros) {
    // SAFETY: only sleeps.
    unsafe { pg_sys::pg_usleep(length) };
    check_for_interrupts();
}

/// `lock_timeout` in microseconds, unless it is off.
pub fn lock_timeout() -> Option<Micros> {
    // SAFETY: a plain global of this single-threaded backend.
    let millis = unsafe { pg_sys::LockTimeout };
    (millis > 0).then(|| Micros::from(millis) * 1_000)
}

/// Raises 25006 in a read-only transaction or on a standby, 25000 in a parallel worker.
pub fn prevent_unless_writable(function: &CStr) {
    // SAFETY: XactReadOnly is a plain global of this single-threaded backend; the name is a valid C
    // string; both functions only raise.
    unsafe {
        if pg_sys::XactReadOnly {
            pg_sys::PreventCommandIfReadOnly(function.as_ptr());
        }
        if raw::quiet::IsInParallelMode() {
            pg_sys::PreventCommandIfParallelMode(function.as_ptr());
        }
    }
}

/// Has the coming commit wait for its WAL to be on disk, whatever `synchronous_commit` says.
pub fn force_sync_commit() {
    // SAFETY: sets a flag of the current transaction.
    unsafe { pg_sys::ForceSyncCommit() };
}

/// Tells the client something that is no error.
pub fn notice(message: &'static str, hint: &'static str) {
    let code = pg_sys::errcodes::PgSqlErrorCode::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE;
    pg_sys::panic::ErrorReport::new(code, message, "")
        .set_hint(hint)
        .report(pgrx::PgLogLevel::NOTICE);
}

/// Refuses settings below `prefix` that nobody defined.
pub fn reserve_setting_prefix(prefix: &CStr) {
    // SAFETY: the prefix is a valid C string, copied by the callee.
    unsafe { pg_sys::MarkGUCPrefixReserved(prefix.as_ptr()) };
}

/// `text` of the database's encoding in UTF-8; in a SQL_ASCII database the bytes as they are.
pub fn to_utf8(text: &[u8]) -> Cow<'_, [u8]> {
    const UTF8: i32 = pg_sys::pg_enc::PG_UTF8 as i32;
    const SQL_ASCII: i32 = pg_sys::pg_enc::PG_SQL_ASCII as i32;
    if text.is_ascii() {
        return Cow::Borrowed(text);
    }
    // SAFETY: the source is valid for its length; the result is either the source itself or a
    // null-terminated copy in the current memory context.
    unsafe {
        let encoding = pg_sys::GetDatabaseEncoding();
        if encoding == UTF8 || encoding == SQL_ASCII {
            return Cow::Borrowed(text);
        }
        let converted = pg_sys::pg_do_encoding_conversion(
            text.as_ptr().cast_mut(),
            text.len() as i32,
            encoding,
            UTF8,
        );
        Cow::Owned(CStr::from_ptr(converted.cast()).to_bytes().to_vec())
    }
}
