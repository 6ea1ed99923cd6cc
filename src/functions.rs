//! The SQL functions: arguments in, results out. What they do is in [`crate::idempotency`]; what they
//! promise is said in `sql/idem.sql`, whose parameter lists the positions here follow.

use crate::contention::Wait;
use crate::idempotency::{self, Begun, Completion};
use crate::locks;
use crate::pg::fmgr::{Call, Shape, Value, Varlena, sql_functions};
use crate::pg::{prevent_unless_writable, to_utf8};
use crate::settings;
use crate::storage::{Found, Key, Stored};
use idem_core::error::Error;
use idem_core::identity::{Domain, Identity, hash_fingerprint};
use idem_core::{Token, limits};
use pgrx::pg_sys::{self, BuiltinOid::*};

sql_functions! {
    idem_begin(7) => begin;
    idem_complete(6) => complete;
    idem_release(3) => release;
    idem_extend(4) => extend;
    idem_get(3) => get;
    idem_forget(2) => forget;
    lock_try(4) => lock_try;
    lock_acquire(5) => lock_acquire;
    lock_extend(4) => lock_extend;
    lock_unlock(3) => lock_unlock;
    lock_guard(3) => lock_guard;
    lock_try_xact(2) => lock_try_xact;
    lock_acquire_xact(3) => lock_acquire_xact;
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
    let name = limits::name(argument, call.bytes(0))?.to_vec();
    let scope = call.bytes(scope).map_or_else(settings::scope, <[u8]>::to_vec);
    limits::label("scope", &scope)?;
    let identity = Identity::new(domain, &to_utf8(&scope), &to_utf8(&name));
    Ok(Key { identity, scope, name })
}

/// Owners belong to a later version: a given one is refused, never ignored.
fn no_owner(call: &Call, owner: usize) -> Result<(), Error> {
    call.bytes(owner).map_or(Ok(()), |_| Err(Error::NotBuilt { argument: "owner" }))
}

static BEGUN: Shape<9> = Shape::new([
    (c"status", TEXTOID),
    (c"token", UUIDOID),
    (c"result", JSONBOID),
    (c"body", BYTEAOID),
    (c"attempt", INT4OID),
    (c"checkpoint", JSONBOID),
    (c"retry_after", INTERVALOID),
    (c"completed_at", TIMESTAMPTZOID),
    (c"expires_at", TIMESTAMPTZOID),
]);

/// `idem_begin(key, fingerprint, scope, owner, lease, wait, takeover)`
fn begin(call: &Call) -> Reply {
    prevent_unless_writable(c"idem_begin()");
    let key = key(call, 2)?;
    let fingerprint = call.bytes(1).map(hash_fingerprint);
    no_owner(call, 3)?;
    let lease = call.interval(4).map(|lease| lease.positive("lease")).transpose()?;
    let wait = Wait::For(match call.interval(5) {
        Some(wait) => wait.not_negative("wait")?,
        None => settings::wait(),
    });
    match call.bool(6) {
        Some(true) => {}
        Some(false) => {
            return Err(Error::NotBuilt { argument: "takeover => false" });
        }
        None => {
            return Err(Error::Null { argument: "takeover" });
        }
    }

    let none = Value::Null;
    let row = match idempotency::begin(call.function(), &key, fingerprint, lease, wait)? {
        Begun::Acquired { token, attempt, lease_end } => [
            Value::Static("acquired"),
            Value::Token(token),
            none,
            none,
            Value::Int(attempt),
            none,
            none,
            none,
            lease_end.map(Value::Moment).into(),
        ],
        Begun::Completed(done) => [
            Value::Static("completed"),
            none,
            done.result.into(),
            done.body.into(),
            none,
            none,
            none,
            Value::Moment(done.completed_at),
            Value::Moment(done.expires_at),
        ],
        Begun::InProgress { lease_end, retry_after } => [
            Value::Static("in_progress"),
            none,
            none,
            none,
            none,
            none,
            retry_after.map(Value::Interval).into(),
            none,
            lease_end.map(Value::Moment).into(),
        ],
        Begun::Mismatch => {
            [Value::Static("mismatch"), none, none, none, none, none, none, none, none]
        }
    };
    Ok(call.row(&BEGUN, row))
}

/// `idem_complete(key, result, body, token, scope, ttl)`
fn complete(call: &Call) -> Reply {
    prevent_unless_writable(c"idem_complete()");
    let key = key(call, 4)?;
    let ttl = match call.interval(5) {
        Some(ttl) => ttl.positive("ttl")?,
        None => settings::ttl(),
    };
    let completion = Completion { result: call.varlena(1), body: call.varlena(2), ttl };
    idempotency::complete(call.function(), &key, &completion, call.token(3))?;
    Ok(call.value(Value::Null))
}

/// `idem_release(key, token, scope)`
fn release(call: &Call) -> Reply {
    prevent_unless_writable(c"idem_release()");
    let key = key(call, 2)?;
    let released = idempotency::release(call.function(), &key, call.token(1))?;
    Ok(call.value(Value::Bool(released)))
}

/// `idem_extend(key, token, lease, scope)`
fn extend(call: &Call) -> Reply {
    prevent_unless_writable(c"idem_extend()");
    let key = key(call, 3)?;
    let lease = call.interval(2).map(|lease| lease.positive("lease")).transpose()?;
    let lease_end = idempotency::extend(call.function(), &key, call.token(1), lease)?;
    Ok(call.value(Value::Moment(lease_end)))
}

static GOT: Shape<11> = Shape::new([
    (c"scope", TEXTOID),
    (c"key", TEXTOID),
    (c"state", TEXTOID),
    (c"owner", TEXTOID),
    (c"attempt", INT4OID),
    (c"checkpoint", JSONBOID),
    (c"result", JSONBOID),
    (c"body", BYTEAOID),
    (c"created_at", TIMESTAMPTZOID),
    (c"completed_at", TIMESTAMPTZOID),
    (c"expires_at", TIMESTAMPTZOID),
]);

/// `idem_get(key, scope, owner)`
fn get(call: &Call) -> Reply {
    let key = key(call, 1)?;
    no_owner(call, 2)?;
    let Some((found, state)) = idempotency::get(call.function(), &key)? else {
        return call.no_row();
    };
    let Found { stored, owner, checkpoint, .. } = found;
    let none = Value::Null;
    let (attempt, created_at, [result, body, completed_at], expires_at) = match stored {
        Stored::Claim(claim) => (claim.attempt, claim.created_at, [none; 3], claim.lease_end),
        Stored::Completed(done) => {
            let completed_at = Value::Moment(done.completed_at);
            let finished = [done.result.into(), done.body.into(), completed_at];
            (done.attempt, done.created_at, finished, done.expires_at)
        }
    };
    let row = [
        Varlena::new(&key.scope).into(),
        Varlena::new(&key.name).into(),
        Value::Static(state),
        owner.into(),
        Value::Int(attempt),
        checkpoint.into(),
        result,
        body,
        Value::Moment(created_at),
        completed_at,
        Value::Moment(expires_at),
    ];
    call.only_row(call.row(&GOT, row))
}

/// `idem_forget(key, scope)`
fn forget(call: &Call) -> Reply {
    prevent_unless_writable(c"idem_forget()");
    let key = key(call, 1)?;
    let forgotten = idempotency::forget(call.function(), &key)?;
    Ok(call.value(Value::Bool(forgotten)))
}

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
fn lock_try(call: &Call) -> Reply {
    prevent_unless_writable(c"lock_try()");
    take_lock(call, [1, 2, 3], Wait::For(0))
}

/// `lock_acquire(name, wait, ttl, scope, holder)`
fn lock_acquire(call: &Call) -> Reply {
    prevent_unless_writable(c"lock_acquire()");
    take_lock(call, [2, 3, 4], endless_wait(call, 1)?)
}

/// `lock_extend(name, token, ttl, scope)`
fn lock_extend(call: &Call) -> Reply {
    prevent_unless_writable(c"lock_extend()");
    let name = lock_name(call, 3)?;
    let ttl = call.interval(2).map(|ttl| ttl.positive("ttl")).transpose()?;
    let lease_end = locks::extend(call.function(), &name, lock_token(call, 1)?, ttl)?;
    Ok(call.value(Value::Moment(lease_end)))
}

/// `lock_unlock(name, token, scope)`
fn lock_unlock(call: &Call) -> Reply {
    prevent_unless_writable(c"lock_unlock()");
    let name = lock_name(call, 2)?;
    let unlocked = locks::unlock(call.function(), &name, lock_token(call, 1)?)?;
    Ok(call.value(Value::Bool(unlocked)))
}

/// `lock_guard(name, token, scope)`
fn lock_guard(call: &Call) -> Reply {
    prevent_unless_writable(c"lock_guard()");
    let name = lock_name(call, 2)?;
    let fence = locks::guard(call.function(), &name, lock_token(call, 1)?)?;
    Ok(call.value(Value::Long(fence)))
}

/// `lock_try_xact(name, scope)`
fn lock_try_xact(call: &Call) -> Reply {
    prevent_unless_writable(c"lock_try_xact()");
    let name = lock_name(call, 1)?;
    let taken = locks::take_for_transaction(call.function(), &name, Wait::For(0))?;
    Ok(call.value(Value::Bool(taken)))
}

/// `lock_acquire_xact(name, wait, scope)`
fn lock_acquire_xact(call: &Call) -> Reply {
    prevent_unless_writable(c"lock_acquire_xact()");
    let name = lock_name(call, 2)?;
    let taken = locks::take_for_transaction(call.function(), &name, endless_wait(call, 1)?)?;
    Ok(call.value(Value::Bool(taken)))
}
