//! Idempotency keys: begin, complete, release, extend, get, forget.
//!
//! Each function follows the same line: refuse what cannot be, take the key's lock, look, decide,
//! write. What a record means is decided in `idem_core::decision`; here it is carried out.
//!
//! **The key's lock is the claim.** A claim without a lease is nothing but the key's lock and an
//! entry in `pg::xact`; `complete` then writes one row. A claim on a lease is a row of its own,
//! written at once; its holder needs no lock once it has committed.

use crate::contention::{Busy, Lease, Seen, Wait, contend};
use crate::pg::lock::{self, Mode, Tried};
use crate::pg::table::{Access, Look};
use crate::pg::{self, fmgr::Varlena, xact};
use crate::settings;
use crate::storage::{Found, Key, Storage, Stored, StoredClaim, StoredCompletion};
use idem_core::decision::{self, Decision, Request, same_request};
use idem_core::error::{Error, Lost};
use idem_core::held::{Claim, End};
use idem_core::{Fingerprint, Micros, Moment, Token};
use pgrx::pg_sys;

/// What `idem_begin` answers.
pub enum Begun {
    Acquired {
        token: Token,
        attempt: i32,
        lease_end: Option<Moment>,
    },
    Completed(StoredCompletion),
    /// `lease_end` and `retry_after` are `None` while the holder is an open transaction.
    InProgress {
        lease_end: Option<Moment>,
        retry_after: Option<Micros>,
    },
    Mismatch,
}

/// Claims `key`, or says who or what is in the way. Waits up to `wait` for another holder.
pub fn begin(
    function: pg_sys::Oid,
    key: &Key,
    fingerprint: Option<Fingerprint>,
    lease: Option<Micros>,
    wait: Wait,
) -> Result<Begun, Error> {
    if let Some(claim) = xact::open(&key.identity) {
        return begin_again(function, key, claim, fingerprint, lease);
    }
    let request = Request { fingerprint };
    let begun = contend(&key.identity, wait, |tried| {
        let locked = tried != Tried::Busy;
        let storage = Storage::open(function, if locked { Access::Write } else { Access::Read })?;
        let found = storage.find(key, Look::Newest)?;
        let now = pg::now();
        let decision = decision::decide(found.as_ref().map(Found::record).as_ref(), &request, now);
        if let (true, Decision::Acquire { attempt }) = (locked, decision) {
            let answer = acquire(&storage, key, fingerprint, lease, attempt, found.as_ref());
            storage.close(true);
            return Ok(Seen::Answer { answer, keep_lock: true });
        }
        storage.close(false);
        let answer = match (decision, found) {
            (Decision::Replay, Some(Found { stored: Stored::Completed(done), .. })) => {
                Begun::Completed(done)
            }
            (Decision::Mismatch, _) => Begun::Mismatch,
            (Decision::InProgress { lease_end }, _) => {
                return Ok(Seen::Leased(Lease { end: lease_end, left: lease_end - now }));
            }
            _ => return Ok(Seen::Nothing),
        };
        Ok(Seen::Answer { answer, keep_lock: false })
    })?;
    Ok(begun.unwrap_or_else(|Busy { lease }| Begun::InProgress {
        lease_end: lease.map(|lease| lease.end),
        retry_after: lease.map(|lease| lease.left),
    }))
}

/// Makes the claim; the key's lock is held and stays held until the transaction ends.
fn acquire(
    storage: &Storage,
    key: &Key,
    fingerprint: Option<Fingerprint>,
    lease: Option<Micros>,
    attempt: i32,
    found: Option<&Found>,
) -> Begun {
    let token = pg::new_token();
    let now = pg::now();
    // A takeover goes on with the record: its age and, unless a new one is given, its fingerprint.
    let (fingerprint, created_at) = match found.map(|found| &found.stored) {
        Some(Stored::Claim(taken)) => (fingerprint.or(taken.fingerprint), taken.created_at),
        _ => (fingerprint, now),
    };
    let mut lease_end = None;
    if let Some(lease) = lease {
        let end = now + lease;
        lease_end = Some(end);
        let claim = StoredClaim { token, created_at, lease_end: end, lease, attempt, fingerprint };
        storage.put_claim(key, &claim, found);
        pg::force_sync_commit();
    }
    xact::claim(Claim {
        identity: key.identity,
        token,
        fingerprint,
        lease,
        attempt,
        created_at,
        stale_row: lease.is_none() && found.is_some(),
    });
    Begun::Acquired { token, attempt, lease_end }
}

/// `idem_begin` repeated in the transaction that holds the key: the same claim again.
fn begin_again(
    function: pg_sys::Oid,
    key: &Key,
    claim: Claim,
    fingerprint: Option<Fingerprint>,
    lease: Option<Micros>,
) -> Result<Begun, Error> {
    if !same_request(claim.fingerprint, fingerprint) {
        return Ok(Begun::Mismatch);
    }
    if claim.lease != lease {
        return Err(Error::OtherLease);
    }
    let mut lease_end = None;
    if lease.is_some() {
        let storage = Storage::open(function, Access::Read)?;
        lease_end = match own_claim(storage.find(key, Look::Newest)?, &claim.token) {
            Ok((_, stored)) => Some(stored.lease_end),
            Err(lost) => return Err(Error::ClaimLost(lost)),
        };
        storage.close(false);
    }
    Ok(Begun::Acquired { token: claim.token, attempt: claim.attempt, lease_end })
}

/// What `idem_complete` is given.
pub struct Completion {
    pub result: Option<Varlena>,
    pub body: Option<Varlena>,
    pub ttl: Micros,
}

/// Completes the claim that `token` proves, or that this transaction holds if there is none.
pub fn complete(
    function: pg_sys::Oid,
    key: &Key,
    completion: &Completion,
    token: Option<Token>,
) -> Result<(), Error> {
    let bytes = completion.body.map_or(0, Varlena::octets)
        + completion.result.map_or(0, Varlena::jsonb_text_octets);
    let limit = settings::max_result_size();
    if bytes > limit {
        return Err(Error::ResultTooLarge { bytes, limit });
    }

    match held_here(key, token)? {
        Holding::Open(claim) if claim.lease.is_none() => {
            let storage = Storage::open(function, Access::Write)?;
            if claim.stale_row
                && let Some(stale) = storage.find(key, Look::Newest)?
            {
                storage.remove(&stale);
            }
            let of_claim = (claim.token, claim.created_at, claim.attempt, claim.fingerprint);
            put_completion(&storage, key, completion, of_claim);
            storage.close(true);
        }
        Holding::Completed => return Ok(()),
        Holding::Open(Claim { token, .. }) | Holding::Elsewhere(token) => {
            match own_stored_claim(function, key, &token, Mode::Exclusive)? {
                Ok((storage, found, claim)) => {
                    storage.remove(&found);
                    let of_claim =
                        (claim.token, claim.created_at, claim.attempt, claim.fingerprint);
                    put_completion(&storage, key, completion, of_claim);
                    storage.close(true);
                }
                Err(Lost::CompletedAlready) => return Ok(()),
                Err(lost) => return Err(Error::ClaimLost(lost)),
            }
        }
    }
    xact::end(&key.identity, End::Completed);
    Ok(())
}

fn put_completion(
    storage: &Storage,
    key: &Key,
    completion: &Completion,
    (token, created_at, attempt, fingerprint): (Token, Moment, i32, Option<Fingerprint>),
) {
    let completed_at = pg::now();
    storage.put_completion(
        key,
        &StoredCompletion {
            token,
            created_at,
            completed_at,
            expires_at: completed_at + completion.ttl,
            attempt,
            fingerprint,
            result: completion.result,
            body: completion.body,
        },
    );
}

/// Gives the claim up, so that the next caller runs. False, and nothing changed, if the token (or,
/// without one, this transaction) does not hold the key.
pub fn release(function: pg_sys::Oid, key: &Key, token: Option<Token>) -> Result<bool, Error> {
    match held_here(key, token) {
        Ok(Holding::Open(Claim { lease: None, stale_row, .. })) => {
            // What this claim took over goes with it.
            if stale_row {
                let storage = Storage::open(function, Access::Write)?;
                if let Some(stale) = storage.find(key, Look::Newest)? {
                    storage.remove(&stale);
                }
                storage.close(true);
            }
        }
        Ok(Holding::Open(Claim { token, .. }) | Holding::Elsewhere(token)) => {
            match own_stored_claim(function, key, &token, Mode::Exclusive)? {
                Ok((storage, found, _)) => {
                    storage.remove(&found);
                    storage.close(true);
                }
                Err(_) => return Ok(false),
            }
        }
        Ok(Holding::Completed) | Err(_) => return Ok(false),
    }
    xact::end(&key.identity, End::Released);
    Ok(true)
}

/// Gives the claim a new lease from now on; `None` repeats its own. Returns the lease's end.
pub fn extend(
    function: pg_sys::Oid,
    key: &Key,
    token: Option<Token>,
    lease: Option<Micros>,
) -> Result<Moment, Error> {
    let token = match held_here(key, token)? {
        Holding::Open(Claim { lease: None, .. }) => return Err(Error::NoLease),
        Holding::Completed => return Err(Error::ClaimLost(Lost::CompletedAlready)),
        Holding::Open(Claim { token, .. }) | Holding::Elsewhere(token) => token,
    };
    let (storage, found, claim) =
        own_stored_claim(function, key, &token, Mode::ShareUpdateExclusive)?
            .map_err(Error::ClaimLost)?;
    let lease = lease.unwrap_or(claim.lease);
    let lease_end = pg::now() + lease;
    storage.put_claim(key, &StoredClaim { lease, lease_end, ..claim }, Some(&found));
    pg::force_sync_commit();
    storage.close(true);
    Ok(lease_end)
}

/// The live record under the key, or an abandoned claim; `None` if there is none. Reads only.
pub fn get(function: pg_sys::Oid, key: &Key) -> Result<Option<(Found, &'static str)>, Error> {
    let storage = Storage::open(function, Access::Read)?;
    let found = storage.find(key, Look::Snapshot)?;
    storage.close(false);
    let now = pg::now();
    Ok(found.and_then(|found| {
        let state = match &found.stored {
            Stored::Completed(done) if done.expires_at <= now => return None,
            Stored::Completed(_) => "completed",
            Stored::Claim(claim) if claim.lease_end <= now => "abandoned",
            Stored::Claim(_) => "in_progress",
        };
        Some((found, state))
    }))
}

/// Removes whatever is under the key, this transaction's own claim included. False if there is
/// nothing.
pub fn forget(function: pg_sys::Oid, key: &Key) -> Result<bool, Error> {
    let held = xact::open(&key.identity).is_some();
    if !held && look(function, key)?.is_none() {
        return Ok(false);
    }
    lock::lock(key.identity.key_tag, Mode::Exclusive);
    lock::wake(key.identity.wake_tag);
    let storage = Storage::open(function, Access::Write)?;
    let found = storage.find(key, Look::Newest)?;
    if let Some(found) = &found {
        storage.remove(found);
    }
    storage.close(true);
    xact::end(&key.identity, End::Released);
    Ok(held || found.is_some())
}

/// What is under the key once nobody else is about to change it; waits for that. The lock is held in
/// share mode meanwhile, which tells those who want the key that it is only looked at.
fn look(function: pg_sys::Oid, key: &Key) -> Result<Option<Found>, Error> {
    lock::lock(key.identity.key_tag, Mode::Share);
    let storage = Storage::open(function, Access::Read)?;
    let found = storage.find(key, Look::Newest)?;
    storage.close(false);
    lock::unlock(key.identity.key_tag, Mode::Share);
    Ok(found)
}

/// The stored claim that `token` holds, with the key locked in `mode` so that the caller may change
/// it; else why the token holds nothing, with the key not locked. Waits for others at the key.
fn own_stored_claim(
    function: pg_sys::Oid,
    key: &Key,
    token: &Token,
    mode: Mode,
) -> Result<Result<(Storage, Found, StoredClaim), Lost>, Error> {
    if let Err(lost) = own_claim(look(function, key)?, token) {
        return Ok(Err(lost));
    }
    lock::lock(key.identity.key_tag, mode);
    if mode == Mode::Exclusive {
        lock::wake(key.identity.wake_tag);
    }
    let storage = Storage::open(function, Access::Write)?;
    match own_claim(storage.find(key, Look::Newest)?, token) {
        Ok((found, claim)) => Ok(Ok((storage, found, claim))),
        Err(lost) => {
            storage.close(false);
            lock::unlock(key.identity.key_tag, mode);
            Ok(Err(lost))
        }
    }
}

/// What this transaction knows of the claim that a caller means.
enum Holding {
    /// It made the claim, which is open.
    Open(Claim),
    /// It made the claim and completed it.
    Completed,
    /// Another transaction made the claim, if anybody did: this token decides.
    Elsewhere(Token),
}

/// Without a token the claim of this transaction is meant.
fn held_here(key: &Key, token: Option<Token>) -> Result<Holding, Error> {
    match (xact::latest(&key.identity), token) {
        (Some((claim, end)), token) if token.is_none_or(|token| token == claim.token) => {
            match end {
                None => Ok(Holding::Open(claim)),
                Some(End::Completed) => Ok(Holding::Completed),
                Some(End::Released) => Err(Error::ClaimLost(match token {
                    Some(_) => Lost::Absent,
                    None => Lost::NotHeldHere,
                })),
            }
        }
        // While this transaction holds the key, no other token can.
        (Some((_, None)), Some(_)) => Err(Error::ClaimLost(Lost::TakenOver)),
        (_, Some(token)) => Ok(Holding::Elsewhere(token)),
        (_, None) => Err(Error::ClaimLost(Lost::NotHeldHere)),
    }
}

/// The stored claim, if `token` holds it; else why not. The key's lock is held.
fn own_claim(found: Option<Found>, token: &Token) -> Result<(Found, StoredClaim), Lost> {
    let Some(found) = found else {
        return Err(Lost::Absent);
    };
    match &found.stored {
        Stored::Claim(claim) if claim.token == *token => {
            let claim = StoredClaim { ..*claim };
            Ok((found, claim))
        }
        Stored::Claim(_) => Err(Lost::TakenOver),
        Stored::Completed(done) if done.token == *token => Err(Lost::CompletedAlready),
        Stored::Completed(done) if done.expires_at <= pg::now() => Err(Lost::Absent),
        Stored::Completed(_) => Err(Lost::CompletedByOther),
    }
}
