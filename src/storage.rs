//! Where records are kept: the one interface between what idem decides and how it is stored.
//!
//! There are two homes. *Claims* holds the open claims on a lease, updated in place. *Completed*
//! holds finished records, insert only. A claim without a lease has no row at all until it is
//! completed. At most one physical row exists per key over both homes: whoever holds the key's lock
//! and replaces a row that counts no more removes it in the same transaction. The key's lock makes that true;
//! inside each home the primary key on the digest would refuse a second one.
//!
//! Nothing above this file knows the tables; nothing below it knows what a record means.

use crate::pg::fmgr::{Value, Varlena};
use crate::pg::table::{Access, Definition, Look, Row, Table, View};
use idem_core::decision::{Record, State};
use idem_core::error::Error;
use idem_core::identity::Identity;
use idem_core::{Fingerprint, Micros, Moment, Token};
use pgrx::pg_sys::{self, BuiltinOid::*};
use std::cell::OnceCell;

/// A key or the name of a lock: as the caller gave it, and as it is stored and locked.
pub struct Key {
    pub identity: Identity,
    /// In the database's encoding.
    pub scope: Vec<u8>,
    /// In the database's encoding.
    pub name: Vec<u8>,
}

/// The columns of `idem_claims`, in order (see sql/idem.sql).
mod claim {
    pub const TOKEN: usize = 1;
    pub const CREATED_AT: usize = 2;
    pub const EXPIRES_AT: usize = 3;
    pub const LEASE: usize = 4;
    pub const ATTEMPT: usize = 5;
    pub const SCOPE: usize = 6;
    pub const KEY: usize = 7;
    pub const OWNER: usize = 8;
    pub const FINGERPRINT: usize = 9;
    pub const CHECKPOINT: usize = 10;
}

/// The columns of `idem_completed`, in order (see sql/idem.sql).
mod completed {
    pub const TOKEN: usize = 1;
    pub const CREATED_AT: usize = 2;
    pub const COMPLETED_AT: usize = 3;
    pub const EXPIRES_AT: usize = 4;
    pub const ATTEMPT: usize = 5;
    pub const SCOPE: usize = 6;
    pub const KEY: usize = 7;
    pub const OWNER: usize = 8;
    pub const FINGERPRINT: usize = 9;
    pub const RESULT: usize = 10;
    pub const BODY: usize = 11;
}

static CLAIMS: Definition = Definition {
    name: c"idem_claims",
    columns: &[
        UUIDOID,
        UUIDOID,
        TIMESTAMPTZOID,
        TIMESTAMPTZOID,
        INTERVALOID,
        INT4OID,
        TEXTOID,
        TEXTOID,
        TEXTOID,
        BYTEAOID,
        JSONBOID,
    ],
    slot: 0,
};

static COMPLETED: Definition = Definition {
    name: c"idem_completed",
    columns: &[
        UUIDOID,
        UUIDOID,
        TIMESTAMPTZOID,
        TIMESTAMPTZOID,
        TIMESTAMPTZOID,
        INT4OID,
        TEXTOID,
        TEXTOID,
        TEXTOID,
        BYTEAOID,
        JSONBOID,
        BYTEAOID,
    ],
    slot: 1,
};

/// A claim on a lease, as it is stored.
#[derive(Clone, Copy)]
pub struct StoredClaim {
    pub token: Token,
    pub created_at: Moment,
    pub lease_end: Moment,
    pub lease: Micros,
    pub attempt: i32,
    pub fingerprint: Option<Fingerprint>,
    pub owner: Option<Varlena>,
    pub checkpoint: Option<Varlena>,
}

/// A finished record, as it is stored.
pub struct StoredCompletion {
    pub token: Token,
    pub created_at: Moment,
    pub completed_at: Moment,
    pub expires_at: Moment,
    pub attempt: i32,
    pub fingerprint: Option<Fingerprint>,
    pub owner: Option<Varlena>,
    pub result: Option<Varlena>,
    pub body: Option<Varlena>,
}

/// A stored record, from whichever home.
pub enum Stored {
    Claim(StoredClaim),
    Completed(StoredCompletion),
}

/// A record that was found, and where.
pub struct Found {
    pub stored: Stored,
    row: Row,
}

impl Found {
    /// What `idem_core` needs to decide.
    pub fn record(&self) -> Record<'_> {
        let (fingerprint, owner, state) = match &self.stored {
            Stored::Claim(claim) => (
                claim.fingerprint,
                claim.owner,
                State::Claimed { attempt: claim.attempt, lease_end: claim.lease_end },
            ),
            Stored::Completed(done) => {
                (done.fingerprint, done.owner, State::Completed { expires_at: done.expires_at })
            }
        };
        Record { fingerprint, owner: owner.map(Varlena::bytes), state }
    }
}

/// The homes of all records, open for one call; the claims only once they are needed: a replay and the completion
/// of a claim without a lease are not about them.
pub struct Storage {
    function: pg_sys::Oid,
    access: Access,
    claims: OnceCell<Table>,
    completed: Table,
}

impl Storage {
    /// Opens the homes that lie in the schema of the SQL function `function`.
    pub fn open(function: pg_sys::Oid, access: Access) -> Result<Storage, Error> {
        let completed = Table::open(&COMPLETED, function, access)?;
        Ok(Storage { function, access, claims: OnceCell::new(), completed })
    }

    fn claims(&self) -> Result<&Table, Error> {
        if let Some(claims) = self.claims.get() {
            return Ok(claims);
        }
        let claims = Table::open(&CLAIMS, self.function, self.access)?;
        Ok(self.claims.get_or_init(|| claims))
    }

    /// Closes the homes; for a reader nothing stays locked.
    pub fn close(self, keep_locks: bool) {
        self.completed.close(keep_locks);
        if let Some(claims) = self.claims.into_inner() {
            claims.close(keep_locks);
        }
    }

    /// The record under `key`: without the key's lock, [`Look::Newest`] may miss one.
    pub fn find(&self, key: &Key, look: Look) -> Result<Option<Found>, Error> {
        let view = View::open(look);
        let found = self.find_in(key, &view, look);
        view.close();
        found
    }

    fn find_in(&self, key: &Key, view: &View, look: Look) -> Result<Option<Found>, Error> {
        let digest = &key.identity.digest;
        if let Some(row) = self.completed.find(digest, view)? {
            check_key(&row, key, completed::SCOPE, completed::KEY)?;
            return Ok(Some(Found {
                stored: Stored::Completed(StoredCompletion {
                    token: row.token(completed::TOKEN)?,
                    created_at: row.long(completed::CREATED_AT)?,
                    completed_at: row.long(completed::COMPLETED_AT)?,
                    expires_at: row.long(completed::EXPIRES_AT)?,
                    attempt: row.int(completed::ATTEMPT)?,
                    fingerprint: fingerprint(&row, completed::FINGERPRINT)?,
                    owner: row.varlena(completed::OWNER),
                    result: row.varlena(completed::RESULT),
                    body: row.varlena(completed::BODY),
                }),
                row,
            }));
        }
        let claims = self.claims()?;
        // Where nobody uses leases. An ordinary read scans all the same, for its predicate lock.
        if look == Look::Newest && claims.is_empty() {
            return Ok(None);
        }
        if let Some(row) = claims.find(digest, view)? {
            check_key(&row, key, claim::SCOPE, claim::KEY)?;
            return Ok(Some(Found {
                stored: Stored::Claim(StoredClaim {
                    token: row.token(claim::TOKEN)?,
                    created_at: row.long(claim::CREATED_AT)?,
                    lease_end: row.long(claim::EXPIRES_AT)?,
                    lease: row.micros(claim::LEASE)?,
                    attempt: row.int(claim::ATTEMPT)?,
                    fingerprint: fingerprint(&row, claim::FINGERPRINT)?,
                    owner: row.varlena(claim::OWNER),
                    checkpoint: row.varlena(claim::CHECKPOINT),
                }),
                row,
            }));
        }
        Ok(None)
    }

    /// Stores a claim on a lease in place of what was found under the key. The lock of the key is
    /// held.
    pub fn put_claim(
        &self,
        key: &Key,
        claim: &StoredClaim,
        replaced: Option<&Found>,
    ) -> Result<(), Error> {
        let claims = self.claims()?;
        let values = [
            Value::Token(key.identity.digest),
            Value::Token(claim.token),
            Value::Moment(claim.created_at),
            Value::Moment(claim.lease_end),
            Value::Interval(claim.lease),
            Value::Int(claim.attempt),
            Varlena::new(&key.scope).into(),
            Varlena::new(&key.name).into(),
            claim.owner.into(),
            claim.fingerprint.as_ref().map(|f| Varlena::new(f)).into(),
            claim.checkpoint.into(),
        ];
        match replaced {
            Some(Found { stored: Stored::Claim(_), row }) => claims.update(row, &values),
            Some(expired) => {
                self.remove(expired)?;
                claims.insert(&values);
            }
            None => claims.insert(&values),
        }
        Ok(())
    }

    /// Stores a finished record. Nothing else is stored under the key; its lock is held.
    pub fn put_completion(&self, key: &Key, done: &StoredCompletion) {
        self.completed.insert(&[
            Value::Token(key.identity.digest),
            Value::Token(done.token),
            Value::Moment(done.created_at),
            Value::Moment(done.completed_at),
            Value::Moment(done.expires_at),
            Value::Int(done.attempt),
            Varlena::new(&key.scope).into(),
            Varlena::new(&key.name).into(),
            done.owner.into(),
            done.fingerprint.as_ref().map(|f| Varlena::new(f)).into(),
            done.result.into(),
            done.body.into(),
        ]);
    }

    /// Removes what was found. The lock of the key is held.
    pub fn remove(&self, found: &Found) -> Result<(), Error> {
        match found.stored {
            Stored::Claim(_) => self.claims()?.delete(&found.row),
            Stored::Completed(_) => self.completed.delete(&found.row),
        }
        Ok(())
    }
}

/// The digest stands for scope and key; should two pairs ever share one, that is an error and never
/// the wrong record.
pub fn check_key(row: &Row, key: &Key, scope: usize, name: usize) -> Result<(), Error> {
    if row.bytes(scope) == Some(&key.scope) && row.bytes(name) == Some(&key.name) {
        Ok(())
    } else {
        Err(Error::Corrupted { found: "A record's scope and key are not those of its digest." })
    }
}

fn fingerprint(row: &Row, column: usize) -> Result<Option<Fingerprint>, Error> {
    let wrong = Error::Corrupted { found: "A stored fingerprint has not 32 bytes." };
    row.bytes(column).map(|bytes| bytes.try_into().map_err(|_| wrong)).transpose()
}
