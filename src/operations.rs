//! Whole operations, for callers who do not want to think about states: run, once.
//!
//! Both begin and complete a key in one call, and raise what `idem_begin` would report.

use crate::idempotency::{self, Begun, Claiming, Completion};
use crate::pg::fmgr::Varlena;
use crate::pg::user_function::UserFunction;
use crate::pg::xact;
use crate::storage::Key;
use idem_core::error::{Error, Lost};
use idem_core::held::End;
use idem_core::{Micros, Token};
use pgrx::pg_sys;

/// Runs `work` with `request` once under `key` and stores its result for `ttl`; a retry gets what is
/// stored. An error of `work` ends the transaction (or its savepoint) and with it the claim.
pub fn run(
    function: pg_sys::Oid,
    key: &Key,
    claiming: &Claiming,
    work: &UserFunction,
    request: Option<Varlena>,
    ttl: Micros,
) -> Result<Option<Varlena>, Error> {
    let token = match claim(function, key, claiming)? {
        Claimed::Now(token) => token,
        Claimed::Before(result) => return Ok(result),
    };
    let result = work.call(request);
    // The work itself may have ended the claim: then what it returned is nobody's result.
    match xact::latest(&key.identity) {
        Some((claim, None)) if claim.token == token => {}
        Some((_, Some(End::Completed))) => return Err(Error::ClaimLost(Lost::CompletedAlready)),
        _ => return Err(Error::ClaimLost(Lost::Absent)),
    }
    let completion = Completion { result, body: None, ttl };
    idempotency::complete(function, key, &completion, Some(token))?;
    Ok(result)
}

/// True the first time, then false until `ttl` has passed.
pub fn once(
    function: pg_sys::Oid,
    key: &Key,
    claiming: &Claiming,
    ttl: Micros,
) -> Result<bool, Error> {
    let Claimed::Now(token) = claim(function, key, claiming)? else {
        return Ok(false);
    };
    let completion = Completion { result: None, body: None, ttl };
    idempotency::complete(function, key, &completion, Some(token))?;
    Ok(true)
}

enum Claimed {
    Now(Token),
    /// Completed before, with this result.
    Before(Option<Varlena>),
}

/// Claims the key or raises why not: ID001, ID002, ID004, ID005.
fn claim(function: pg_sys::Oid, key: &Key, claiming: &Claiming) -> Result<Claimed, Error> {
    // To wait for oneself would be for ever, to run again within the run a duplicate.
    if xact::open(&key.identity).is_some() {
        return Err(Error::InProgressHere);
    }
    match idempotency::begin(function, key, claiming)? {
        Begun::Acquired { token, .. } => Ok(Claimed::Now(token)),
        Begun::Completed(done) => Ok(Claimed::Before(done.result)),
        Begun::InProgress { retry_after, .. } => Err(Error::InProgress { retry_after }),
        Begun::Mismatch => Err(Error::FingerprintMismatch),
        Begun::Denied => Err(Error::OwnerMismatch),
        Begun::Abandoned(claim) => Err(Error::Abandoned { attempt: claim.attempt }),
    }
}
