//! The SQL functions: arguments in, results out. What they do is in [`crate::idempotency`],
//! [`crate::operations`], [`crate::locks`] and [`crate::statistics`]; what they promise is said in `sql/idem.sql`, whose
//! parameter lists the positions here follow.

mod keys;
mod locks;
mod statistics;

use crate::pg::fmgr::{Call, sql_functions};
use crate::pg::to_utf8;
use crate::settings;
use crate::storage::Key;
use idem_core::error::Error;
use idem_core::identity::{Domain, Identity};
use idem_core::limits;
use pgrx::pg_sys;

sql_functions! {
    idem_begin(7) => keys::begin;
    idem_complete(6) => keys::complete;
    idem_release(3) => keys::release;
    idem_extend(4) => keys::extend;
    idem_checkpoint(5) => keys::checkpoint;
    idem_run(8) => keys::run;
    idem_once(4) => keys::once;
    idem_get(3) => keys::get;
    idem_forget(2) => keys::forget;
    idem_purge(1) => keys::purge;
    idem_fingerprint(1) => keys::fingerprint;
    idem_fingerprint_json(1) => keys::fingerprint_json;
    idem_compose_key(1) => keys::compose_key;
    lock_try(4) => locks::try_;
    lock_acquire(5) => locks::acquire;
    lock_extend(4) => locks::extend;
    lock_unlock(3) => locks::unlock;
    lock_guard(3) => locks::guard;
    lock_try_xact(2) => locks::try_xact;
    lock_acquire_xact(3) => locks::acquire_xact;
    idem_stats(0) => statistics::stats;
    idem_stats_reset(0) => statistics::reset;
}

type Reply = Result<pg_sys::Datum, Error>;

/// The key in argument 0 and its scope, which defaults to `idem.scope`.
fn key(call: &Call, scope: usize) -> Result<Key, Error> {
    named(call, "key", Domain::Key, scope)
}

/// The name of a lock in argument 0 and its scope, which defaults to `idem.scope`.
fn lock_name(call: &Call, scope: usize) -> Result<Key, Error> {
    named(call, "name", Domain::Lock, scope)
}

fn named(call: &Call, argument: &'static str, domain: Domain, scope: usize) -> Result<Key, Error> {
    let name = call.text(0).ok_or(Error::Null { argument })?;
    limits::name(argument, Some(name.bytes()))?;
    let scope = call.text(scope).unwrap_or_else(settings::scope);
    limits::label("scope", scope.bytes())?;
    let identity = Identity::new(domain, &to_utf8(scope.bytes()), &to_utf8(name.bytes()));
    Ok(Key { identity, scope, name })
}
