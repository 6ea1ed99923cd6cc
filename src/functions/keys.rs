//! The SQL functions of idempotency keys.

use super::{Reply, key};
use crate::contention::Wait;
use crate::idempotency::{self, Begun, Claiming, Completion};
use crate::operations;
use crate::pg::fmgr::{Call, Shape, Value, Varlena};
use crate::pg::user_function::UserFunction;
use crate::pg::{json, prevent_unless_writable, to_utf8};
use crate::purge;
use crate::settings;
use crate::storage::Stored;
use idem_core::error::Error;
use idem_core::identity::hash_fingerprint;
use idem_core::{Micros, limits, parts};
use pgrx::pg_sys::BuiltinOid::*;

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

/// The owner at this position, which defaults to `idem.owner`.
fn owner(call: &Call, owner: usize) -> Result<Option<Varlena>, Error> {
    let owner = call.text(owner).or_else(settings::owner);
    owner.map(|owner| limits::label("owner", owner.bytes())).transpose()?;
    Ok(owner)
}

/// The wait at this position, if there is one.
fn wait(call: &Call, wait: usize) -> Result<Option<Micros>, Error> {
    call.interval(wait).map(|wait| wait.not_negative("wait")).transpose()
}

/// The ttl at this position, which defaults to `idem.ttl`.
fn ttl(call: &Call, ttl: usize) -> Result<Micros, Error> {
    call.interval(ttl).map_or_else(|| Ok(settings::ttl()), |ttl| ttl.positive("ttl"))
}

fn takeover(call: &Call, takeover: usize) -> Result<bool, Error> {
    call.bool(takeover).ok_or(Error::Null { argument: "takeover" })
}

/// `idem_begin(key, fingerprint, scope, owner, lease, wait, takeover)`
pub fn begin(call: &Call) -> Reply {
    prevent_unless_writable(c"idem_begin()");
    let key = key(call, 2)?;
    let claiming = Claiming {
        fingerprint: call.bytes(1).map(hash_fingerprint),
        owner: owner(call, 3)?,
        lease: call.interval(4).map(|lease| lease.positive("lease")).transpose()?,
        wait: Wait::For(wait(call, 5)?.unwrap_or_else(settings::wait)),
        takeover: takeover(call, 6)?,
    };

    let none = Value::Null;
    let only = |status| [Value::Static(status), none, none, none, none, none, none, none, none];
    let row = match idempotency::begin(call.function(), &key, &claiming)? {
        Begun::Acquired { token, attempt, lease_end, checkpoint } => [
            Value::Static("acquired"),
            Value::Token(token),
            none,
            none,
            Value::Int(attempt),
            checkpoint.into(),
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
        Begun::Mismatch => only("mismatch"),
        Begun::Denied => only("denied"),
        Begun::Abandoned(claim) => [
            Value::Static("abandoned"),
            none,
            none,
            none,
            Value::Int(claim.attempt),
            claim.checkpoint.into(),
            none,
            none,
            Value::Moment(claim.lease_end),
        ],
    };
    Ok(call.row(&BEGUN, row))
}

/// `idem_complete(key, result, body, token, scope, ttl)`
pub fn complete(call: &Call) -> Reply {
    prevent_unless_writable(c"idem_complete()");
    let key = key(call, 4)?;
    let completion =
        Completion { result: call.varlena(1), body: call.varlena(2), ttl: ttl(call, 5)? };
    idempotency::complete(call.function(), &key, &completion, call.token(3))?;
    Ok(call.value(Value::Void))
}

/// `idem_release(key, token, scope)`
pub fn release(call: &Call) -> Reply {
    prevent_unless_writable(c"idem_release()");
    let key = key(call, 2)?;
    let released = idempotency::release(call.function(), &key, call.token(1))?;
    Ok(call.value(Value::Bool(released)))
}

/// `idem_extend(key, token, lease, scope)`
pub fn extend(call: &Call) -> Reply {
    prevent_unless_writable(c"idem_extend()");
    let key = key(call, 3)?;
    let lease = call.interval(2).map(|lease| lease.positive("lease")).transpose()?;
    let lease_end = idempotency::extend(call.function(), &key, call.token(1), lease)?;
    Ok(call.value(Value::Moment(lease_end)))
}

/// `idem_checkpoint(key, checkpoint, token, lease, scope)`
pub fn checkpoint(call: &Call) -> Reply {
    prevent_unless_writable(c"idem_checkpoint()");
    let key = key(call, 4)?;
    let checkpoint = call.varlena(1).ok_or(Error::Null { argument: "checkpoint" })?;
    let lease = call.interval(3).map(|lease| lease.positive("lease")).transpose()?;
    idempotency::checkpoint(call.function(), &key, call.token(2), lease, checkpoint)?;
    Ok(call.value(Value::Void))
}

/// `idem_run(key, func, request, scope, owner, wait, ttl, takeover)`
pub fn run(call: &Call) -> Reply {
    prevent_unless_writable(c"idem_run()");
    let key = key(call, 3)?;
    let request = call.varlena(2);
    let work = call.oid(1).ok_or(Error::Null { argument: "func" })?;
    let work = UserFunction::of_request(work, request.is_none())?;
    let claiming = Claiming {
        fingerprint: request.map(|request| hash_fingerprint(&json::fingerprint(request))),
        owner: owner(call, 4)?,
        lease: None,
        wait: Wait::For(wait(call, 5)?.unwrap_or_else(settings::wait)),
        takeover: takeover(call, 7)?,
    };
    let ttl = ttl(call, 6)?;
    let result = operations::run(call.function(), &key, &claiming, &work, request, ttl)?;
    Ok(call.value(result.into()))
}

/// `idem_once(key, scope, wait, ttl)`
pub fn once(call: &Call) -> Reply {
    prevent_unless_writable(c"idem_once()");
    let key = key(call, 1)?;
    let claiming = Claiming {
        fingerprint: None,
        owner: settings::owner(),
        lease: None,
        wait: wait(call, 2)?.map_or(Wait::Forever, Wait::For),
        takeover: true,
    };
    let first = operations::once(call.function(), &key, &claiming, ttl(call, 3)?)?;
    Ok(call.value(Value::Bool(first)))
}

/// The parts of the list in argument 0, in the database's encoding.
fn parts_of(call: &Call) -> Result<Vec<&[u8]>, Error> {
    let parts = call.texts(0).ok_or(Error::Null { argument: "parts" })?;
    parts.into_iter().map(|part| part.ok_or(Error::NullPart)).collect()
}

/// `idem_fingerprint(VARIADIC parts)`
pub fn fingerprint(call: &Call) -> Reply {
    let parts: Vec<_> = parts_of(call)?.into_iter().map(to_utf8).collect();
    let fingerprint = parts::fingerprint(parts.iter().map(|part| &**part));
    Ok(call.value(Varlena::new(&fingerprint).into()))
}

/// `idem_fingerprint_json(request)`
pub fn fingerprint_json(call: &Call) -> Reply {
    let request = call.varlena(0).ok_or(Error::Null { argument: "request" })?;
    Ok(call.value(Varlena::new(&json::fingerprint(request)).into()))
}

/// `idem_compose_key(VARIADIC parts)`
pub fn compose_key(call: &Call) -> Reply {
    let parts = parts_of(call)?;
    if parts.is_empty() {
        return Err(Error::NoParts);
    }
    Ok(call.value(Varlena::new(&parts::compose_key(parts)).into()))
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
pub fn get(call: &Call) -> Reply {
    let key = key(call, 1)?;
    let owner = owner(call, 2)?.map(Varlena::bytes);
    let Some((stored, state)) = idempotency::get(call.function(), &key, owner)? else {
        return call.no_row();
    };
    let none = Value::Null;
    let (owner, attempt, checkpoint, created_at, [result, body, completed_at], expires_at) =
        match stored {
            Stored::Claim(claim) => (
                claim.owner,
                claim.attempt,
                claim.checkpoint,
                claim.created_at,
                [none; 3],
                claim.lease_end,
            ),
            Stored::Completed(done) => (
                done.owner,
                done.attempt,
                None,
                done.created_at,
                [done.result.into(), done.body.into(), Value::Moment(done.completed_at)],
                done.expires_at,
            ),
        };
    let row = [
        key.scope.into(),
        key.name.into(),
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
pub fn forget(call: &Call) -> Reply {
    prevent_unless_writable(c"idem_forget()");
    let key = key(call, 1)?;
    let forgotten = idempotency::forget(call.function(), &key)?;
    Ok(call.value(Value::Bool(forgotten)))
}

/// `idem_purge(max_rows)`
pub fn purge(call: &Call) -> Reply {
    prevent_unless_writable(c"idem_purge()");
    let max_rows = limits::rows("max_rows", call.int(0))?;
    let reclaimed = purge::purge(call.function(), max_rows)?;
    Ok(call.value(Value::Long(reclaimed as i64)))
}
