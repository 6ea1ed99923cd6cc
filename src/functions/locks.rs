//! The SQL functions of locks.

use super::{Reply, lock_name};
use crate::contention::Wait;
use crate::locks;
use crate::pg::fmgr::{Call, Shape, Value};
use crate::pg::prevent_unless_writable;
use crate::settings;
use idem_core::error::Error;
use idem_core::{Token, limits};
use pgrx::pg_sys::BuiltinOid::*;

static GRANT: Shape<6> = Shape::new([
    (c"acquired", BOOLOID),
    (c"token", UUIDOID),
    (c"fence", INT8OID),
    (c"expires_at", TIMESTAMPTZOID),
    (c"held_by", TEXTOID),
    (c"retry_after", INTERVALOID),
]);

/// Takes a lease lock: `ttl`, `scope` and `holder` are at these positions.
fn take_lock(call: &Call, [ttl, scope, holder]: [usize; 3], wait: Wait) -> Reply {
    let name = lock_name(call, scope)?;
    let ttl = match call.interval(ttl) {
        Some(ttl) => ttl.positive("ttl")?,
        None => settings::lock_ttl(),
    };
    if let Some(holder) = call.bytes(holder) {
        limits::label("holder", holder)?;
    }
    let none = Value::Null;
    let row = match locks::take(call.function(), &name, ttl, call.varlena(holder), wait)? {
        Ok(grant) => [
            Value::Bool(true),
            Value::Token(grant.token),
            Value::Long(grant.fence),
            Value::Moment(grant.lease_end),
            none,
            none,
        ],
        Err(held) => [
            Value::Bool(false),
            none,
            none,
            held.lease_end.map(Value::Moment).into(),
            held.holder.into(),
            held.retry_after.map(Value::Interval).into(),
        ],
    };
    Ok(call.row(&GRANT, row))
}

/// A wait of `lock_acquire` and `lock_acquire_xact`: NULL is until the lock is got.
fn endless_wait(call: &Call, wait: usize) -> Result<Wait, Error> {
    match call.interval(wait) {
        Some(wait) => wait.not_negative("wait").map(Wait::For),
        None => Ok(Wait::Forever),
    }
}

/// The token at this position, which a lock's holder must give.
fn lock_token(call: &Call, token: usize) -> Result<Token, Error> {
    call.token(token).ok_or(Error::Null { argument: "token" })
}

/// `lock_try(name, ttl, scope, holder)`
pub fn try_(call: &Call) -> Reply {
    prevent_unless_writable(c"lock_try()");
    take_lock(call, [1, 2, 3], Wait::For(0))
}

/// `lock_acquire(name, wait, ttl, scope, holder)`
pub fn acquire(call: &Call) -> Reply {
    prevent_unless_writable(c"lock_acquire()");
    take_lock(call, [2, 3, 4], endless_wait(call, 1)?)
}

/// `lock_extend(name, token, ttl, scope)`
pub fn extend(call: &Call) -> Reply {
    prevent_unless_writable(c"lock_extend()");
    let name = lock_name(call, 3)?;
    let ttl = call.interval(2).map(|ttl| ttl.positive("ttl")).transpose()?;
    let lease_end = locks::extend(call.function(), &name, lock_token(call, 1)?, ttl)?;
    Ok(call.value(Value::Moment(lease_end)))
}

/// `lock_unlock(name, token, scope)`
pub fn unlock(call: &Call) -> Reply {
    prevent_unless_writable(c"lock_unlock()");
    let name = lock_name(call, 2)?;
    let unlocked = locks::unlock(call.function(), &name, lock_token(call, 1)?)?;
    Ok(call.value(Value::Bool(unlocked)))
}

/// `lock_guard(name, token, scope)`
pub fn guard(call: &Call) -> Reply {
    prevent_unless_writable(c"lock_guard()");
    let name = lock_name(call, 2)?;
    let fence = locks::guard(call.function(), &name, lock_token(call, 1)?)?;
    Ok(call.value(Value::Long(fence)))
}

/// `lock_try_xact(name, scope)`
pub fn try_xact(call: &Call) -> Reply {
    prevent_unless_writable(c"lock_try_xact()");
    let name = lock_name(call, 1)?;
    let taken = locks::take_for_transaction(call.function(), &name, Wait::For(0))?;
    Ok(call.value(Value::Bool(taken)))
}

/// `lock_acquire_xact(name, wait, scope)`
pub fn acquire_xact(call: &Call) -> Reply {
    prevent_unless_writable(c"lock_acquire_xact()");
    let name = lock_name(call, 2)?;
    let taken = locks::take_for_transaction(call.function(), &name, endless_wait(call, 1)?)?;
    Ok(call.value(Value::Bool(taken)))
}
