//! The settings, one static each. Names, defaults and ranges are part of the contract.

use crate::pg::fmgr::Varlena;
use idem_core::Micros;
use idem_core::duration::{LONGEST, SECOND};
use pgrx::{GucContext, GucFlags, GucRegistry, GucSetting};
use std::ffi::CString;

/// `idem.scope`: the scope of calls that give none. Default: the empty scope.
static SCOPE: GucSetting<Option<CString>> = GucSetting::<Option<CString>>::new(Some(c""));

/// `idem.owner`: the owner of calls that give none. Default: empty, which is no owner.
static OWNER: GucSetting<Option<CString>> = GucSetting::<Option<CString>>::new(Some(c""));

/// `idem.authorizer`: a function that decides who else than its owner may see a record. Default:
/// empty, which is nobody. Superusers only.
static AUTHORIZER: GucSetting<Option<CString>> = GucSetting::<Option<CString>>::new(Some(c""));

/// `idem.ttl`, seconds: how long a completed record counts. Default 24 hours.
static TTL: GucSetting<i32> = GucSetting::<i32>::new(86_400);

/// `idem.wait`, milliseconds: how long `idem_begin` waits for a holder. Default 0: not at all.
static WAIT: GucSetting<i32> = GucSetting::<i32>::new(0);

/// `idem.lock_ttl`, milliseconds: how long the lease of a lock lasts. Default 30 seconds.
static LOCK_TTL: GucSetting<i32> = GucSetting::<i32>::new(30_000);

/// `idem.max_result_size`, bytes of `result::text` plus `body`. Default 1 MB. Superusers only.
static MAX_RESULT_SIZE: GucSetting<i32> = GucSetting::<i32>::new(1024 * 1024);

/// `idem.test_clock`, microseconds since 2000: the moment at which the clock stands still, if not 0. A double holds such
/// numbers exactly. Only in builds for the model test.
#[cfg(feature = "test-clock")]
static TEST_CLOCK: GucSetting<f64> = GucSetting::<f64>::new(0.0);

/// Registers the settings; called once, when the library is loaded.
pub fn define() {
    GucRegistry::define_string_guc(
        c"idem.scope",
        c"Scope of keys and locks in calls that give none.",
        c"A convenience, not a boundary: any role may set it.",
        &SCOPE,
        GucContext::Userset,
        GucFlags::default(),
    );
    GucRegistry::define_string_guc(
        c"idem.owner",
        c"Owner of idempotency keys in calls that give none.",
        c"Empty is no owner. A convenience, not a boundary: any role may set it.",
        &OWNER,
        GucContext::Userset,
        GucFlags::default(),
    );
    GucRegistry::define_string_guc(
        c"idem.authorizer",
        c"Function that decides who else than its owner may see a record.",
        c"schema.function, of arguments (caller text, owner text), returning boolean; empty is none.",
        &AUTHORIZER,
        GucContext::Suset,
        GucFlags::default(),
    );
    GucRegistry::define_int_guc(
        c"idem.ttl",
        c"How long a completed idempotency record counts, unless idem_complete is given a ttl.",
        c"",
        &TTL,
        1,
        (LONGEST / SECOND) as i32,
        GucContext::Userset,
        GucFlags::UNIT_S,
    );
    GucRegistry::define_int_guc(
        c"idem.wait",
        c"How long idem_begin waits for another holder of the key, unless it is given a wait.",
        c"0 answers at once.",
        &WAIT,
        0,
        i32::MAX,
        GucContext::Userset,
        GucFlags::UNIT_MS,
    );
    GucRegistry::define_int_guc(
        c"idem.lock_ttl",
        c"How long the lease of a lock lasts, unless lock_try or lock_acquire is given a ttl.",
        c"",
        &LOCK_TTL,
        1,
        i32::MAX,
        GucContext::Userset,
        GucFlags::UNIT_MS,
    );
    GucRegistry::define_int_guc(
        c"idem.max_result_size",
        c"The largest result that idem_complete stores: bytes of result::text plus bytes of body.",
        c"",
        &MAX_RESULT_SIZE,
        0,
        i32::MAX,
        GucContext::Suset,
        GucFlags::UNIT_BYTE,
    );
    #[cfg(feature = "test-clock")]
    GucRegistry::define_float_guc(
        c"idem.test_clock",
        c"Moment at which the clock stands still, in microseconds since 2000; for tests.",
        c"0 is the clock of the server.",
        &TEST_CLOCK,
        0.0,
        1e18,
        GucContext::Userset,
        GucFlags::default(),
    );
    crate::pg::reserve_setting_prefix(c"idem");
}

/// The default scope, in the database's encoding.
pub fn scope() -> Varlena {
    Varlena::of_setting(&SCOPE).unwrap_or_else(|| Varlena::new(b""))
}

/// The default owner, in the database's encoding.
pub fn owner() -> Option<Varlena> {
    Varlena::of_setting(&OWNER)
}

/// The name of the authorizer.
pub fn authorizer() -> Option<CString> {
    AUTHORIZER.get().filter(|name| !name.is_empty())
}

/// The default ttl.
pub fn ttl() -> Micros {
    Micros::from(TTL.get()) * SECOND
}

/// The default wait.
pub fn wait() -> Micros {
    Micros::from(WAIT.get()) * 1_000
}

/// The default ttl of a lock.
pub fn lock_ttl() -> Micros {
    Micros::from(LOCK_TTL.get()) * 1_000
}

/// The moment at which the clock stands still.
#[cfg(feature = "test-clock")]
pub fn test_clock() -> Option<idem_core::Moment> {
    Some(TEST_CLOCK.get() as i64).filter(|moment| *moment != 0)
}

/// The largest result, in bytes.
pub fn max_result_size() -> u64 {
    MAX_RESULT_SIZE.get().unsigned_abs().into()
}
