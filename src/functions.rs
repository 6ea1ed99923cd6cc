//! The SQL functions: arguments in, results out. What they do is in [`crate::idempotency`]; what they
//! promise is said in `sql/idem.sql`, whose parameter lists the positions here follow.

use crate::idempotency::{self, Begun, Completion};
use crate::pg::fmgr::{Call, Shape, Value, Varlena, sql_functions};
use crate::pg::{prevent_unless_writable, to_utf8};
use crate::settings;
use crate::storage::{Found, Key, Stored};
use idem_core::error::Error;
use idem_core::identity::{Domain, Identity, hash_fingerprint};
use idem_core::limits;
use pgrx::pg_sys::{self, BuiltinOid::*};

sql_functions! {
    idem_begin(7) => begin;
    idem_complete(6) => complete;
    idem_release(3) => release;
    idem_extend(4) => extend;
    idem_get(3) => get;
    idem_forget(2) => forget;
}

type Reply = Result<pg_sys::Datum, Error>;

/// The key in argument 0 and its scope, which defaults to `idem.scope`.
fn key(call: &Call, scope: usize) -> Result<Key, Error> {
    let name = limits::name("key", call.bytes(0))?.to_vec();
    let scope = call
        .bytes(scope)
        .map_or_else(settings::scope, <[u8]>::to_vec);
    limits::label("scope", &scope)?;
    let identity = Identity::new(Domain::Key, &to_utf8(&scope), &to_utf8(&name));
    Ok(Key {
        identity,
        scope,
        name,
    })
}

/// Owners belong to a later version: a given one is refused, never ignored.
fn no_owner(call: &Call, owner: usize) -> Result<(), Error> {
    call.bytes(owner)
        .map_or(Ok(()), |_| Err(Error::NotBuilt { argument: "owner" }))
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
    let lease = call
        .interval(4)
        .map(|lease| lease.positive("lease"))
        .transpose()?;
    let wait = match call.interval(5) {
        Some(wait) => wait.not_negative("wait")?,
        None => settings::wait(),
    };
    match call.bool(6) {
        Some(true) => {}
        Some(false) => {
            return Err(Error::NotBuilt {
                argument: "takeover => false",
            });
        }
        None => {
            return Err(Error::Null {
                argument: "takeover",
            });
        }
    }

    let none = Value::Null;
    let row = match idempotency::begin(call.function(), &key, fingerprint, lease, wait)? {
        Begun::Acquired {
            token,
            attempt,
            lease_end,
        } => [
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
        Begun::InProgress {
            lease_end,
            retry_after,
        } => [
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
        Begun::Mismatch => [
            Value::Static("mismatch"),
            none,
            none,
            none,
            none,
            none,
            none,
            none,
            none,
        ],
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
    let completion = Completion {
        result: call.varlena(1),
        body: call.varlena(2),
        ttl,
    };
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
    let lease = call
        .interval(2)
        .map(|lease| lease.positive("lease"))
        .transpose()?;
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
    let Found {
        stored,
        owner,
        checkpoint,
        ..
    } = found;
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
