//! Where records are kept: the one interface between what idem decides and how it is stored.
//!
//! There are three kinds of homes. *Claims* holds the open claims on a lease, updated in place. The *segments* hold
//! finished records, insert only; one of them is the current one, the others are waiting for their end, when they are
//! emptied as a whole (see `ring.rs`). *Long* holds finished records that outlive the current segment. A claim
//! without a lease has no row at all until it is completed.
//!
//! At most one physical row exists per key over all homes: whoever holds the key's lock and replaces a
//! row that counts no more removes it in the same transaction. The key's lock makes that true; inside each
//! home the primary key on the digest would refuse a second one. Only a purge works without the key's lock: it
//! removes what counts no more, if nobody is about to change it.
//!
//! Nothing above this file knows the tables; nothing below it knows what a record means.

use crate::filters;
use crate::pg;
use crate::pg::fmgr::{Value, Varlena};
use crate::pg::table::{self, Access, Definition, Look, Row, Table, View};
use crate::pg::truncate::truncate;
use crate::ring;
use idem_core::decision::{Record, State};
use idem_core::error::Error;
use idem_core::identity::Identity;
use idem_core::ring::{Ring, SEGMENTS};
use idem_core::{Fingerprint, Micros, Moment, Token};
use pgrx::pg_sys::{self, BuiltinOid::*};
use std::cell::Cell;
use std::ffi::CStr;

/// A key or the name of a lock: as the caller gave it, and as it is stored and locked.
#[derive(Clone, Copy)]
pub struct Key {
    pub identity: Identity,
    /// In the database's encoding, detoasted.
    pub scope: Varlena,
    /// In the database's encoding, detoasted.
    pub name: Varlena,
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

/// The columns of `idem_segment_0` and its like, in order (see sql/idem.sql).
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

const fn of_completed(name: &'static CStr, slot: usize) -> Definition {
    Definition {
        name,
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
        slot,
    }
}

static LONG: Definition = of_completed(c"idem_long", 1);

/// The segments, which `filters.rs` reads, too.
pub static SEGMENT: [Definition; SEGMENTS] = [
    of_completed(c"idem_segment_0", 2),
    of_completed(c"idem_segment_1", 3),
    of_completed(c"idem_segment_2", 4),
    of_completed(c"idem_segment_3", 5),
    of_completed(c"idem_segment_4", 6),
    of_completed(c"idem_segment_5", 7),
    of_completed(c"idem_segment_6", 8),
    of_completed(c"idem_segment_7", 9),
];

/// A table in which records are kept.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Home {
    Claims,
    Long,
    Segment(usize),
}

/// How many homes there are.
const HOMES: usize = 2 + SEGMENTS;

impl Home {
    /// By their places in the cache.
    const ALL: [Home; HOMES] = [
        Home::Claims,
        Home::Long,
        Home::Segment(0),
        Home::Segment(1),
        Home::Segment(2),
        Home::Segment(3),
        Home::Segment(4),
        Home::Segment(5),
        Home::Segment(6),
        Home::Segment(7),
    ];

    fn definition(self) -> &'static Definition {
        match self {
            Home::Claims => &CLAIMS,
            Home::Long => &LONG,
            Home::Segment(segment) => &SEGMENT[segment],
        }
    }
}

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
    home: Home,
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

/// The homes of all records, for one call: each is opened when it is needed, and closed at once after a look
/// in which nothing was found.
pub struct Storage {
    function: pg_sys::Oid,
    open: [Cell<Option<Table>>; HOMES],
}

impl Storage {
    /// The homes that lie in the schema of the SQL function `function`. For a writer, the one that a finished record
    /// goes to is locked.
    pub fn open(function: pg_sys::Oid, access: Access) -> Result<Storage, Error> {
        let storage = Storage { function, open: [const { Cell::new(None) }; HOMES] };
        if access == Access::Write {
            let current = ring::read(function)?.current();
            storage
                .home(current.map_or(Home::Long, |turn| Home::Segment(turn.segment())), access)?;
        }
        Ok(storage)
    }

    /// The table of a home, which stays open.
    fn home(&self, home: Home, access: Access) -> Result<Table, Error> {
        let open = &self.open[home.definition().slot];
        if let Some(table) = open.get() {
            if access == Access::Write {
                table.lock_for_writing();
            }
            return Ok(table);
        }
        let table = Table::open(home.definition(), self.function, access)?;
        open.set(Some(table));
        Ok(table)
    }

    /// Closes the homes. Those that were or will be written stay locked until the transaction ends, unless nothing was.
    pub fn close(self, keep_locks: bool) {
        for table in self.open {
            if let Some(table) = table.get() {
                table.close(keep_locks && table.is_for_writing());
            }
        }
    }

    /// The record under `key`: without the key's lock, [`Look::Newest`] may miss one.
    pub fn find(&self, key: &Key, look: Look) -> Result<Option<Found>, Error> {
        let view = View::open(look);
        let found = self.find_anywhere(key, &view, look);
        view.close();
        found
    }

    fn find_anywhere(&self, key: &Key, view: &View, look: Look) -> Result<Option<Found>, Error> {
        let [newest, older @ ..] = ring::read(self.function)?.newest_first().map(Home::Segment);
        if let Some(found) = self.find_in(newest, key, view)? {
            return Ok(Some(found));
        }
        // An ordinary read scans an empty table all the same, for its predicate lock.
        let without = match look {
            Look::Newest => self.homes_without(&key.identity.digest, newest)?,
            Look::Snapshot => [false; HOMES],
        };
        for home in older.into_iter().chain([Home::Long, Home::Claims]) {
            if !without[home.definition().slot]
                && let Some(found) = self.find_in(home, key, view)?
            {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    /// Which homes surely have no row of that digest: those that are empty, and what filters exclude. That of `seen` is not
    /// asked for.
    fn homes_without(&self, digest: &[u8; 16], seen: Home) -> Result<[bool; HOMES], Error> {
        let now = pg::now();
        loop {
            let changes = table::changes();
            let settled = settled(changes, now);
            let filters = filters::read(self.function, now)?;
            let known = Home::ALL.map(|home| {
                settled[home.definition().slot]
                    || matches!(home, Home::Segment(segment) if filters.exclude(segment, digest))
            });
            let asked = std::array::from_fn(|slot| {
                let home = Home::ALL[slot];
                (!known[slot] && home != seen).then(|| home.definition())
            });
            let mut without = table::are_empty(asked, self.function)?;
            // Now everything was heard of that was committed before this call.
            if table::changes() != changes {
                continue;
            }
            for (slot, home) in Home::ALL.into_iter().enumerate() {
                if let (Home::Segment(segment), true) = (home, without[slot]) {
                    settle(self.function, segment, now)?;
                }
                without[slot] |= known[slot];
            }
            return Ok(without);
        }
    }

    fn find_in(&self, home: Home, key: &Key, view: &View) -> Result<Option<Found>, Error> {
        let open = &self.open[home.definition().slot];
        let was_open = open.get().is_some();
        let table = self.home(home, Access::Read)?;
        let row = table.find(&key.identity.digest, view);
        let Some(row) = row else {
            if !was_open {
                open.set(None);
                table.close(false);
            }
            return Ok(None);
        };
        let stored = match home {
            Home::Claims => {
                check_key(&row, key, claim::SCOPE, claim::KEY)?;
                Stored::Claim(stored_claim(&row)?)
            }
            Home::Long | Home::Segment(_) => {
                check_key(&row, key, completed::SCOPE, completed::KEY)?;
                Stored::Completed(stored_completion(&row)?)
            }
        };
        Ok(Some(Found { stored, home, row }))
    }

    /// Stores a claim on a lease in place of what was found under the key. The lock of the key is
    /// held. False, and nothing stored, if a purge has removed what was found.
    pub fn put_claim(
        &self,
        key: &Key,
        claim: &StoredClaim,
        replaced: Option<&Found>,
    ) -> Result<bool, Error> {
        let values = [
            Value::Token(key.identity.digest),
            Value::Token(claim.token),
            Value::Moment(claim.created_at),
            Value::Moment(claim.lease_end),
            Value::Interval(claim.lease),
            Value::Int(claim.attempt),
            key.scope.into(),
            key.name.into(),
            claim.owner.into(),
            claim.fingerprint.as_ref().map(|f| Varlena::new(f)).into(),
            claim.checkpoint.into(),
        ];
        let claims = self.home(Home::Claims, Access::Write)?;
        if let Some(Found { stored: Stored::Claim(_), row, .. }) = replaced {
            return claims.update(row, &values);
        }
        if let Some(expired) = replaced {
            self.remove(expired)?;
        }
        claims.insert(&values);
        Ok(true)
    }

    /// Stores a finished record. Nothing else is stored under the key; its lock is held.
    pub fn put_completion(&self, key: &Key, done: &StoredCompletion) -> Result<(), Error> {
        self.home_until(done.expires_at)?.insert(&[
            Value::Token(key.identity.digest),
            Value::Token(done.token),
            Value::Moment(done.created_at),
            Value::Moment(done.completed_at),
            Value::Moment(done.expires_at),
            Value::Int(done.attempt),
            key.scope.into(),
            key.name.into(),
            done.owner.into(),
            done.fingerprint.as_ref().map(|f| Varlena::new(f)).into(),
            done.result.into(),
            done.body.into(),
        ]);
        Ok(())
    }

    /// The home of a record that expires then, locked for writing. A segment's turn is looked at again under its
    /// lock: once it is emptied, nobody writes to it before its next turn.
    fn home_until(&self, expires_at: Moment) -> Result<Table, Error> {
        loop {
            let turn = ring::read(self.function)?.current().filter(|turn| turn.takes(expires_at));
            let Some(turn) = turn else {
                return self.home(Home::Long, Access::Write);
            };
            let table = self.home(Home::Segment(turn.segment()), Access::Write)?;
            if ring::read(self.function)?.current() == Some(turn) {
                return Ok(table);
            }
        }
    }

    /// Removes what was found. The lock of the key is held. False if a purge has done it.
    pub fn remove(&self, found: &Found) -> Result<bool, Error> {
        self.home(found.home, Access::Write)?.delete(&found.row)
    }
}

/// What is known of segments that are empty until their turn comes.
#[derive(Clone, Copy)]
struct Settled {
    /// `table::changes()` when that was found, and the moment.
    changes: u64,
    since: Moment,
    /// One bit each.
    segments: u8,
}

/// Only SQL could fill such a segment all the same (a data-only restore beside running sessions, logical replication). So what
/// is known is found anew after so long.
const SETTLED_FOR: Micros = 1_000_000;

thread_local! {
    static SETTLED: Cell<Settled> = const { Cell::new(Settled { changes: 0, since: 0, segments: 0 }) };
}

/// The homes that are known to be empty without asking.
fn settled(changes: u64, now: Moment) -> [bool; HOMES] {
    let known = SETTLED.get();
    let counts = known.changes == changes && (0..SETTLED_FOR).contains(&(now - known.since));
    Home::ALL.map(|home| match home {
        Home::Segment(segment) => counts && known.segments & (1 << segment) != 0,
        Home::Claims | Home::Long => false,
    })
}

/// Remembers that `segment` is empty and stays so, if it does: it is not the current one, and nobody is about to write to it.
/// Whoever wants to write to it later locks it first, and so knows of the ring what is known here; and when its turn comes
/// the ring changes.
fn settle(function: pg_sys::Oid, segment: usize, now: Moment) -> Result<(), Error> {
    let Some(table) = Table::try_open(&SEGMENT[segment], function, Access::Still)? else {
        return Ok(());
    };
    let changes = table::changes();
    // As everybody knows it who locks the segment now.
    let ring = ring::read_committed(function)?;
    let current = |ring: Ring| ring.current().map(|turn| turn.segment());
    if ring.is_some_and(|ring| current(ring) != Some(segment)) && table.is_empty() {
        let mut known = SETTLED.get();
        if known.changes != changes || now - known.since >= SETTLED_FOR || now < known.since {
            known = Settled { changes, since: now, segments: 0 };
        }
        known.segments |= 1 << segment;
        SETTLED.set(known);
    }
    table.close(false);
    Ok(())
}

fn stored_claim(row: &Row) -> Result<StoredClaim, Error> {
    Ok(StoredClaim {
        token: row.token(claim::TOKEN)?,
        created_at: row.long(claim::CREATED_AT)?,
        lease_end: row.long(claim::EXPIRES_AT)?,
        lease: row.micros(claim::LEASE)?,
        attempt: row.int(claim::ATTEMPT)?,
        fingerprint: fingerprint(row, claim::FINGERPRINT)?,
        owner: row.varlena(claim::OWNER),
        checkpoint: row.varlena(claim::CHECKPOINT),
    })
}

fn stored_completion(row: &Row) -> Result<StoredCompletion, Error> {
    Ok(StoredCompletion {
        token: row.token(completed::TOKEN)?,
        created_at: row.long(completed::CREATED_AT)?,
        completed_at: row.long(completed::COMPLETED_AT)?,
        expires_at: row.long(completed::EXPIRES_AT)?,
        attempt: row.int(completed::ATTEMPT)?,
        fingerprint: fingerprint(row, completed::FINGERPRINT)?,
        owner: row.varlena(completed::OWNER),
        result: row.varlena(completed::RESULT),
        body: row.varlena(completed::BODY),
    })
}

/// Deletes at most `limit` claims whose lease was over by `before`; says how many. 0 if somebody has the table for himself.
pub fn purge_claims(function: pg_sys::Oid, before: Moment, limit: u64) -> Result<u64, Error> {
    let Some(table) = Table::try_open(&CLAIMS, function, Access::Write)? else { return Ok(0) };
    let mut deleted = 0;
    table.scan(|row| {
        if row.long(claim::EXPIRES_AT)? <= before && table.delete_unchanged(&row) {
            deleted += 1;
        }
        Ok(deleted < limit)
    })?;
    table.close(deleted > 0);
    Ok(deleted)
}

/// Deletes at most `limit` finished records outside the segments that had expired by `before`; says how many. 0 if somebody
/// has the table for himself.
pub fn purge_long(function: pg_sys::Oid, before: Moment, limit: u64) -> Result<u64, Error> {
    let Some(table) = Table::try_open(&LONG, function, Access::Write)? else { return Ok(0) };
    let mut deleted = 0;
    if !table.is_empty() {
        table.scan_until(completed::EXPIRES_AT, before, |row| {
            deleted += u64::from(table.delete_unchanged(&row));
            Ok(deleted < limit)
        })?;
    }
    table.close(deleted > 0);
    Ok(deleted)
}

/// How a segment stands.
pub struct Segment {
    /// Bytes of its rows, without what lies outside them.
    pub bytes: u64,
    /// It is read through in no time, and nothing in it counts.
    pub worthless: bool,
}

/// A segment of at most so many blocks is read through to see whether anything in it counts: where there is little
/// traffic, records need not wait for their segment's bound.
const FEW_BLOCKS: u32 = 64;

/// How `segment` stands; `None` if that cannot be told without waiting.
pub fn examine_segment(
    function: pg_sys::Oid,
    segment: usize,
    now: Moment,
) -> Result<Option<Segment>, Error> {
    let Some(table) = Table::try_open(&SEGMENT[segment], function, Access::Read)? else {
        return Ok(None);
    };
    let bytes = u64::from(table.blocks()) * u64::from(pg_sys::BLCKSZ);
    let worthless = bytes > 0 && worthless_rows(&table, now)?.is_some();
    table.close(false);
    Ok(Some(Segment { bytes, worthless }))
}

/// How many rows a small table has, if none of them counts.
fn worthless_rows(table: &Table, now: Moment) -> Result<Option<u64>, Error> {
    if table.blocks() > FEW_BLOCKS {
        return Ok(None);
    }
    let mut rows = Some(0);
    table.scan(|row| {
        rows =
            if row.long(completed::EXPIRES_AT)? <= now { rows.map(|rows| rows + 1) } else { None };
        Ok(rows.is_some())
    })?;
    Ok(rows)
}

/// Empties `segment` if nobody else is at it; says how many rows it had, estimated if they are many. With `over`, nothing
/// in it counts any more; else that is looked at once more, now that nobody can write to it.
pub fn empty_segment(
    function: pg_sys::Oid,
    segment: usize,
    over: bool,
    now: Moment,
) -> Result<Option<u64>, Error> {
    truncate(&SEGMENT[segment], function, |table| {
        let rows = worthless_rows(table, now)?;
        Ok(if over { rows.or_else(|| Some(table.estimated_rows())) } else { rows })
    })
}

/// Has nobody look into the empty `segment` or write to it before this transaction ends, so that its turn can begin.
/// False if it is not empty or somebody is at it.
pub fn reserve_segment(function: pg_sys::Oid, segment: usize) -> Result<bool, Error> {
    let Some(table) = Table::open_alone(&SEGMENT[segment], function)? else {
        return Ok(false);
    };
    let empty = table.is_empty();
    table.close(empty);
    Ok(empty)
}

/// The digest stands for scope and key; should two pairs ever share one, that is an error and never
/// the wrong record.
pub fn check_key(row: &Row, key: &Key, scope: usize, name: usize) -> Result<(), Error> {
    if row.bytes(scope) == Some(key.scope.bytes()) && row.bytes(name) == Some(key.name.bytes()) {
        Ok(())
    } else {
        Err(Error::Corrupted { found: "A record's scope and key are not those of its digest." })
    }
}

fn fingerprint(row: &Row, column: usize) -> Result<Option<Fingerprint>, Error> {
    let wrong = Error::Corrupted { found: "A stored fingerprint has not 32 bytes." };
    row.bytes(column).map(|bytes| bytes.try_into().map_err(|_| wrong)).transpose()
}
