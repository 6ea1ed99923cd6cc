//! Idempotency keys: begin, complete, release, extend, checkpoint, get, forget.
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
use crate::pg::user_function::UserFunction;
use crate::pg::{self, fmgr::Varlena, xact};
use crate::settings;
use crate::statistics::{Counter, count};
use crate::storage::{Found, Key, Storage, Stored, StoredClaim, StoredCompletion};
use idem_core::decision::{self, Decision, Request, same_owner, same_request};
use idem_core::error::{Error, Lost};
use idem_core::held::{Claim, End};
use idem_core::{Fingerprint, Micros, Moment, Token};
use pgrx::pg_sys;

/// What `idem_begin` is given.
pub struct Claiming {
    pub fingerprint: Option<Fingerprint>,
    pub owner: Option<Varlena>,
    pub lease: Option<Micros>,
    pub wait: Wait,
    /// Whether a lease that ran out may be taken over.
    pub takeover: bool,
}

impl Claiming {
    fn request(&self) -> Request<'_> {
        let Claiming { fingerprint, takeover, .. } = *self;
        Request { fingerprint, owner: self.owner.map(Varlena::bytes), takeover }
    }
}

/// What `idem_begin` answers.
pub enum Begun {
    Acquired {
        token: Token,
        attempt: i32,
        lease_end: Option<Moment>,
        checkpoint: Option<Varlena>,
    },
    Completed(StoredCompletion),
    /// `lease_end` and `retry_after` are `None` while the holder is an open transaction.
    InProgress {
        lease_end: Option<Moment>,
        retry_after: Option<Micros>,
    },
    Mismatch,
    Denied,
    Abandoned(StoredClaim),
}

/// Claims `key`, or says who or what is in the way.
pub fn begin(function: pg_sys::Oid, key: &Key, claiming: &Claiming) -> Result<Begun, Error> {
    let begun = begin_uncounted(function, key, claiming)?;
    match &begun {
        Begun::Completed(_) => count(Counter::Replayed),
        Begun::InProgress { .. } => count(Counter::InProgress),
        Begun::Mismatch => count(Counter::Mismatch),
        Begun::Denied => count(Counter::Denied),
        Begun::Acquired { .. } | Begun::Abandoned(_) => {}
    }
    Ok(begun)
}

fn begin_uncounted(function: pg_sys::Oid, key: &Key, claiming: &Claiming) -> Result<Begun, Error> {
    if let Some(claim) = xact::open(&key.identity) {
        return begin_again(function, key, claim, claiming);
    }
    if !claiming.takeover
        && let Some(begun) = begin_without_takeover(function, key, claiming)?
    {
        return Ok(begun);
    }
    let begun = contend(&key.identity, claiming.wait, |tried| {
        let locked = tried != Tried::Busy;
        let storage = Storage::open(function, if locked { Access::Write } else { Access::Read })?;
        loop {
            let found = storage.find(key, Look::Newest)?;
            let (decision, now) = decide(found.as_ref(), claiming)?;
            let Decision::Acquire { attempt } = decision else {
                storage.close(false);
                return Ok(seen(decision, found, now));
            };
            if !locked {
                storage.close(false);
                return Ok(seen(decision, found, now));
            }
            // Unless what is to be taken over was purged meanwhile: then look again.
            if let Some(answer) = acquire(&storage, key, claiming, attempt, found.as_ref(), now)? {
                storage.close(true);
                return Ok(Seen::Answer { answer, keep_lock: true });
            }
        }
    })?;
    Ok(begun.unwrap_or_else(|Busy { lease }| Begun::InProgress {
        lease_end: lease.map(|lease| lease.end),
        retry_after: lease.map(|lease| lease.left),
    }))
}

/// Answers a caller who does not want to take over, if a look in share mode will do: an abandoned
/// claim, which stays as it is, must not seem held to others meanwhile.
fn begin_without_takeover(
    function: pg_sys::Oid,
    key: &Key,
    claiming: &Claiming,
) -> Result<Option<Begun>, Error> {
    if lock::try_lock(key.identity.key_tag, Mode::Share) == Tried::Busy {
        return Ok(None);
    }
    let storage = Storage::open(function, Access::Read)?;
    let found = storage.find(key, Look::Newest)?;
    storage.close(false);
    lock::unlock(key.identity.key_tag, Mode::Share);
    let (decision, now) = decide(found.as_ref(), claiming)?;
    Ok(match seen(decision, found, now) {
        Seen::Answer { answer, .. } => Some(answer),
        Seen::Leased(_) | Seen::Nothing { .. } => None,
    })
}

/// What the record means for the caller, and the moment that was judged at.
fn decide(found: Option<&Found>, claiming: &Claiming) -> Result<(Decision, Moment), Error> {
    let record = found.map(Found::record);
    let request = claiming.request();
    let mut now = pg::now();
    let mut authorized = false;
    if decision::asks_authorizer(record.as_ref(), request.owner, now) {
        authorized = authorizes(record.and_then(|record| record.owner), request.owner)?;
        now = pg::now();
    }
    Ok((decision::decide(record.as_ref(), &request, authorized, now), now))
}

/// Whether the authorizer, if there is one, lets `caller` see a record of `owner`.
fn authorizes(owner: Option<&[u8]>, caller: Option<&[u8]>) -> Result<bool, Error> {
    let (Some(name), Some(owner), Some(caller)) = (settings::authorizer(), owner, caller) else {
        return Ok(false);
    };
    let authorizer = UserFunction::authorizer(&name)?;
    Ok(authorizer.ask([Varlena::new(caller), Varlena::new(owner)]))
}

/// The answer of a look that leads to no claim.
fn seen(decision: Decision, found: Option<Found>, now: Moment) -> Seen<Begun> {
    let answer = match (decision, found.map(|found| found.stored)) {
        (Decision::Replay, Some(Stored::Completed(done))) => Begun::Completed(done),
        (Decision::Abandoned, Some(Stored::Claim(claim))) => Begun::Abandoned(claim),
        (Decision::Mismatch, _) => Begun::Mismatch,
        (Decision::Denied, _) => Begun::Denied,
        (Decision::InProgress { lease_end }, _) => {
            return Seen::Leased(Lease { end: lease_end, left: lease_end - now });
        }
        (_, row) => return Seen::Nothing { stale: row.is_some() },
    };
    Seen::Answer { answer, keep_lock: false }
}

/// Makes the claim; the key's lock is held and stays held until the transaction ends. `None` if the claim that was
/// to be taken over is gone.
fn acquire(
    storage: &Storage,
    key: &Key,
    claiming: &Claiming,
    attempt: i32,
    found: Option<&Found>,
    now: Moment,
) -> Result<Option<Begun>, Error> {
    let token = pg::new_token();
    let mut claim = StoredClaim {
        token,
        created_at: now,
        lease_end: now + claiming.lease.unwrap_or(0),
        lease: claiming.lease.unwrap_or(0),
        attempt,
        fingerprint: claiming.fingerprint,
        owner: claiming.owner,
        checkpoint: None,
    };
    // A takeover goes on with the record.
    if let Some(Found { stored: Stored::Claim(taken), .. }) = found {
        claim.created_at = taken.created_at;
        claim.fingerprint = claim.fingerprint.or(taken.fingerprint);
        claim.owner = claim.owner.or(taken.owner);
        claim.checkpoint = taken.checkpoint;
        count(Counter::TakenOver);
    }
    if claiming.lease.is_some() {
        if !storage.put_claim(key, &claim, found)? {
            return Ok(None);
        }
        pg::force_sync_commit();
    }
    xact::claim(Claim {
        identity: key.identity,
        token,
        fingerprint: claim.fingerprint,
        owner: claim.owner.map(|owner| owner.bytes().to_vec()),
        lease: claiming.lease,
        attempt,
        created_at: claim.created_at,
        checkpoint: claim
            .checkpoint
            .filter(|_| claiming.lease.is_none())
            .map(|checkpoint| checkpoint.bytes().to_vec()),
        stale_row: claiming.lease.is_none() && found.is_some(),
    });
    let lease_end = claiming.lease.map(|_| claim.lease_end);
    Ok(Some(Begun::Acquired { token, attempt, lease_end, checkpoint: claim.checkpoint }))
}

/// `idem_begin` repeated in the transaction that holds the key: the same claim again.
fn begin_again(
    function: pg_sys::Oid,
    key: &Key,
    claim: Claim,
    claiming: &Claiming,
) -> Result<Begun, Error> {
    if !same_owner(claim.owner.as_deref(), claiming.owner.map(Varlena::bytes)) {
        return Ok(Begun::Denied);
    }
    if !same_request(claim.fingerprint, claiming.fingerprint) {
        return Ok(Begun::Mismatch);
    }
    if claim.lease != claiming.lease {
        return Err(Error::OtherLease);
    }
    let Claim { token, attempt, checkpoint, .. } = claim;
    let checkpoint = checkpoint.as_deref().map(Varlena::new);
    let mut again = Begun::Acquired { token, attempt, lease_end: None, checkpoint };
    if claim.lease.is_some() {
        let storage = Storage::open(function, Access::Read)?;
        // It may have been prolonged since, and have got a checkpoint.
        if let Some(Found { stored: Stored::Claim(row), .. }) = storage.find(key, Look::Newest)? {
            let lease_end = Some(row.lease_end);
            again = Begun::Acquired { token, attempt, lease_end, checkpoint: row.checkpoint };
        }
        storage.close(false);
    }
    Ok(again)
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
                storage.remove(&stale)?;
            }
            let owner = claim.owner.as_deref().map(Varlena::new);
            let Claim { token, created_at, attempt, fingerprint, .. } = claim;
            let completer = Completer { token, created_at, attempt, fingerprint, owner };
            put_completion(&storage, key, completion, completer)?;
            storage.close(true);
        }
        Holding::Open(Claim { token, .. }) | Holding::Stored(token) => {
            match own_stored_claim(function, key, &token, Mode::Exclusive)? {
                Ok((storage, found, claim)) => {
                    if !storage.remove(&found)? {
                        return Err(Error::ClaimLost(Lost::Absent));
                    }
                    let StoredClaim { token, created_at, attempt, fingerprint, owner, .. } = claim;
                    let completer = Completer { token, created_at, attempt, fingerprint, owner };
                    put_completion(&storage, key, completion, completer)?;
                    storage.close(true);
                }
                Err(Lost::CompletedAlready) => return Ok(()),
                Err(lost) => return Err(Error::ClaimLost(lost)),
            }
        }
    }
    xact::end(&key.identity, End::Completed);
    count(Counter::Executed);
    Ok(())
}

/// What a completed record takes over from its claim.
struct Completer {
    token: Token,
    created_at: Moment,
    attempt: i32,
    fingerprint: Option<Fingerprint>,
    owner: Option<Varlena>,
}

fn put_completion(
    storage: &Storage,
    key: &Key,
    completion: &Completion,
    completer: Completer,
) -> Result<(), Error> {
    let Completer { token, created_at, attempt, fingerprint, owner } = completer;
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
            owner,
            result: completion.result,
            body: completion.body,
        },
    )
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
                    storage.remove(&stale)?;
                }
                storage.close(true);
            }
        }
        Ok(Holding::Open(Claim { token, .. }) | Holding::Stored(token)) => {
            match own_stored_claim(function, key, &token, Mode::Exclusive)? {
                Ok((storage, found, _)) => {
                    let removed = storage.remove(&found)?;
                    storage.close(true);
                    if !removed {
                        lock::unlock(key.identity.key_tag, Mode::Exclusive);
                        return Ok(false);
                    }
                }
                Err(_) => return Ok(false),
            }
        }
        Err(_) => return Ok(false),
    }
    xact::end(&key.identity, End::Released);
    count(Counter::Released);
    Ok(true)
}

/// Gives the claim a new lease from now on; `None` repeats its own. Returns the lease's end.
pub fn extend(
    function: pg_sys::Oid,
    key: &Key,
    token: Option<Token>,
    lease: Option<Micros>,
) -> Result<Moment, Error> {
    prolong(function, key, token, lease, None, Error::NoLease)
}

/// Saves how far the work on the claim has come, for the next attempt, and prolongs its lease.
pub fn checkpoint(
    function: pg_sys::Oid,
    key: &Key,
    token: Option<Token>,
    lease: Option<Micros>,
    checkpoint: Varlena,
) -> Result<(), Error> {
    prolong(function, key, token, lease, Some(checkpoint), Error::NothingToRecover).map(|_| ())
}

fn prolong(
    function: pg_sys::Oid,
    key: &Key,
    token: Option<Token>,
    lease: Option<Micros>,
    checkpoint: Option<Varlena>,
    without_lease: Error,
) -> Result<Moment, Error> {
    let token = match held_here(key, token)? {
        Holding::Open(Claim { lease: None, .. }) => return Err(without_lease),
        Holding::Open(Claim { token, .. }) | Holding::Stored(token) => token,
    };
    let (storage, found, mut claim) =
        own_stored_claim(function, key, &token, Mode::ShareUpdateExclusive)?
            .map_err(Error::ClaimLost)?;
    let before = claim.lease_end;
    claim.lease = lease.unwrap_or(claim.lease);
    claim.lease_end = pg::now() + claim.lease;
    if claim.lease_end < before {
        lock::wake(key.identity);
    }
    claim.checkpoint = checkpoint.or(claim.checkpoint);
    if !storage.put_claim(key, &claim, Some(&found))? {
        return Err(Error::ClaimLost(Lost::Absent));
    }
    pg::force_sync_commit();
    storage.close(true);
    Ok(claim.lease_end)
}

/// The live record under the key, or an abandoned claim, and its state; `None` if there is none, or it
/// is not shown to `owner`. Reads only.
pub fn get(
    function: pg_sys::Oid,
    key: &Key,
    owner: Option<&[u8]>,
) -> Result<Option<(Stored, &'static str)>, Error> {
    let storage = Storage::open(function, Access::Read)?;
    let found = storage.find(key, Look::Snapshot)?;
    storage.close(false);
    let Some(found) = found else { return Ok(None) };
    let (record, now) = (found.record(), pg::now());
    let hidden =
        decision::asks_authorizer(Some(&record), owner, now) && !authorizes(record.owner, owner)?;
    if hidden || !decision::counts(&record, now) {
        return Ok(None);
    }
    let state = match &found.stored {
        Stored::Completed(_) => "completed",
        Stored::Claim(claim) if claim.lease_end <= now => "abandoned",
        Stored::Claim(_) => "in_progress",
    };
    Ok(Some((found.stored, state)))
}

/// Removes whatever is under the key, this transaction's own claim included. False if there is
/// nothing.
pub fn forget(function: pg_sys::Oid, key: &Key) -> Result<bool, Error> {
    let held = xact::open(&key.identity).is_some();
    if !held && look(function, key)?.is_none() {
        return Ok(false);
    }
    lock::lock(key.identity.key_tag, Mode::ShareRowExclusive);
    let storage = Storage::open(function, Access::Write)?;
    let found = storage.find(key, Look::Newest)?;
    if found.is_none() && !held {
        // Somebody else was faster: nobody is to wait for us.
        storage.close(false);
        lock::unlock(key.identity.key_tag, Mode::ShareRowExclusive);
        return Ok(false);
    }
    lock_for_change(key, Mode::Exclusive);
    let mut counted = false;
    if let Some(found) = found {
        // One that has expired goes too, but was as good as absent.
        counted = decision::counts(&found.record(), pg::now());
        if !storage.remove(&found)? && !held {
            storage.close(false);
            lock::unlock(key.identity.key_tag, Mode::Exclusive);
            return Ok(false);
        }
    }
    storage.close(true);
    xact::end(&key.identity, End::Released);
    Ok(held || counted)
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

/// The stored claim that `token` holds, with the key locked in `mode`, so that the caller may end it (Exclusive) or
/// prolong it (ShareUpdateExclusive); else why the token holds nothing, with the key not locked. Waits for others at the key.
fn own_stored_claim(
    function: pg_sys::Oid,
    key: &Key,
    token: &Token,
    mode: Mode,
) -> Result<Result<(Storage, Found, StoredClaim), Lost>, Error> {
    if let Err(lost) = own_claim(look(function, key)?, token) {
        return Ok(Err(lost));
    }
    lock::lock(key.identity.key_tag, Mode::ShareRowExclusive);
    let storage = Storage::open(function, Access::Write)?;
    match own_claim(storage.find(key, Look::Newest)?, token) {
        Ok((found, claim)) => {
            lock_for_change(key, mode);
            Ok(Ok((storage, found, claim)))
        }
        Err(lost) => {
            storage.close(false);
            lock::unlock(key.identity.key_tag, Mode::ShareRowExclusive);
            Ok(Err(lost))
        }
    }
}

/// Locks the key in `mode`, which does not wait, in place of ShareRowExclusive.
fn lock_for_change(key: &Key, mode: Mode) {
    match mode {
        Mode::Exclusive => lock::announce_end(key.identity),
        mode => lock::lock(key.identity.key_tag, mode),
    }
    lock::unlock(key.identity.key_tag, Mode::ShareRowExclusive);
}

/// What this transaction knows of the claim that a caller means.
enum Holding {
    /// It made the claim, which is open.
    Open(Claim),
    /// It has no open claim: what is stored decides whether this token holds the key.
    Stored(Token),
}

/// Without a token the claim of this transaction is meant.
fn held_here(key: &Key, token: Option<Token>) -> Result<Holding, Error> {
    match (xact::latest(&key.identity), token) {
        (Some((claim, end)), token) if token.is_none_or(|token| token == claim.token) => {
            match end {
                None => Ok(Holding::Open(claim)),
                // Unless an administrator removed it since, the record is there.
                Some(End::Completed) => Ok(Holding::Stored(claim.token)),
                Some(End::Released) => Err(Error::ClaimLost(match token {
                    Some(_) => Lost::Absent,
                    None => Lost::NotHeldHere,
                })),
            }
        }
        // While this transaction holds the key, no other token can.
        (Some((_, None)), Some(_)) => Err(Error::ClaimLost(Lost::TakenOver)),
        (_, Some(token)) => Ok(Holding::Stored(token)),
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
            let claim = *claim;
            Ok((found, claim))
        }
        Stored::Claim(_) => Err(Lost::TakenOver),
        // Also for the one who completed it: a purge may come at any time.
        Stored::Completed(done) if done.expires_at <= pg::now() => Err(Lost::Absent),
        Stored::Completed(done) if done.token == *token => Err(Lost::CompletedAlready),
        Stored::Completed(_) => Err(Lost::CompletedByOther),
    }
}
