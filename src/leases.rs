//! Where lease locks are kept: one row per name, which stays when the lock is free, for its fence.
//! The row of a name that is long idle is purged; what is left of all such rows is a floor below which no fence is given.
//!
//! Taking, prolonging and unlocking update the row in place; no indexed column ever changes, so a
//! hot name makes no index entries (HOT). Who writes a name's row holds its lock.

use crate::pg::fmgr::{Value, Varlena};
use crate::pg::table::{Access, Definition, Look, Row, Table, View};
use crate::storage::{Key, check_key};
use idem_core::error::Error;
use idem_core::lease::{self, Lease};
use idem_core::{Micros, Moment};
use pgrx::pg_sys::{self, BuiltinOid::*};

/// The columns of `idem_locks`, in order (see sql/idem.sql).
mod column {
    pub const TOKEN: usize = 1;
    pub const FENCE: usize = 2;
    pub const ACQUIRED_AT: usize = 3;
    pub const EXPIRES_AT: usize = 4;
    pub const TTL: usize = 5;
    pub const SCOPE: usize = 6;
    pub const NAME: usize = 7;
    pub const HOLDER: usize = 8;
}

static LOCKS: Definition = Definition {
    name: c"idem_locks",
    columns: &[
        UUIDOID,
        UUIDOID,
        INT8OID,
        TIMESTAMPTZOID,
        TIMESTAMPTZOID,
        INTERVALOID,
        TEXTOID,
        TEXTOID,
        TEXTOID,
    ],
    slot: 10,
};

/// The columns of `idem_floors`, in order.
mod floor {
    pub const FENCE: usize = 0;
    pub const PURGED_AT: usize = 1;
}

static FLOORS: Definition =
    Definition { name: c"idem_floors", columns: &[INT8OID, TIMESTAMPTZOID], slot: 12 };

/// Floors are inserted, never updated, and the last one's predecessors stay for so long: whoever reads the newest state
/// while another is added sees one of them at least.
const FLOORS_STAY: Micros = 3_600 * 1_000_000;

/// A lock's row.
#[derive(Clone, Copy)]
pub struct StoredLease {
    pub lease: Lease,
    pub acquired_at: Moment,
    pub ttl: Micros,
    pub holder: Option<Varlena>,
}

/// A lock's row that was found.
pub struct Found {
    pub stored: StoredLease,
    row: Row,
}

impl Found {
    /// Whether this transaction wrote the row.
    pub fn is_ours(&self) -> bool {
        self.row.is_ours()
    }
}

/// The locks' home, open for one call.
pub struct Leases(Table);

impl Leases {
    /// Opens the home that lies in the schema of the SQL function `function`.
    pub fn open(function: pg_sys::Oid, access: Access) -> Result<Leases, Error> {
        Table::open(&LOCKS, function, access).map(Leases)
    }

    /// Closes the home; for a reader nothing stays locked.
    pub fn close(self, keep_lock: bool) {
        self.0.close(keep_lock);
    }

    /// The row of `name`. Without the name's lock a row that is being updated may be missed.
    pub fn find(&self, name: &Key) -> Result<Option<Found>, Error> {
        let view = View::open(Look::Newest);
        let row = self.0.find(&name.identity.digest, &view);
        view.close();
        let Some(row) = row else { return Ok(None) };
        check_key(&row, name, column::SCOPE, column::NAME)?;
        let stored = StoredLease {
            lease: stored_lease(&row)?,
            acquired_at: row.long(column::ACQUIRED_AT)?,
            ttl: row.micros(column::TTL)?,
            holder: row.varlena(column::HOLDER),
        };
        Ok(Some(Found { stored, row }))
    }

    /// Writes the row of `name` in place of the one that was found. The name's lock is held. False, and nothing
    /// written, if a purge has removed the one that was found.
    pub fn put(
        &self,
        name: &Key,
        row: &StoredLease,
        replaced: Option<&Found>,
    ) -> Result<bool, Error> {
        let values = [
            Value::Token(name.identity.digest),
            row.lease.token.map(Value::Token).into(),
            Value::Long(row.lease.fence),
            Value::Moment(row.acquired_at),
            Value::Moment(row.lease.expires_at),
            Value::Interval(row.ttl),
            name.scope.into(),
            name.name.into(),
            row.holder.into(),
        ];
        match replaced {
            Some(found) => self.0.update(&found.row, &values),
            None => {
                self.0.insert(&values);
                Ok(true)
            }
        }
    }
}

/// No name whose row is gone has had a fence above this.
pub fn floor(function: pg_sys::Oid) -> Result<i64, Error> {
    let floors = Table::open(&FLOORS, function, Access::Read)?;
    let floor = highest(&floors)?;
    floors.close(false);
    Ok(floor)
}

fn highest(floors: &Table) -> Result<i64, Error> {
    let mut highest = 0;
    floors.scan(|row| {
        highest = row.long(floor::FENCE)?.max(highest);
        Ok(true)
    })?;
    Ok(highest)
}

/// Deletes at most `limit` rows of names that are idle since `idle`, and keeps the floor for them; says how many.
pub fn purge(function: pg_sys::Oid, idle: Micros, now: Moment, limit: u64) -> Result<u64, Error> {
    let Some(leases) = Table::try_open(&LOCKS, function, Access::Write)? else { return Ok(0) };
    // Before a row goes, its fence must be sure to stay.
    let Some(floors) = Table::try_open(&FLOORS, function, Access::Write)? else {
        leases.close(false);
        return Ok(0);
    };
    let (mut deleted, mut fence) = (0, 0);
    leases.scan(|row| {
        let lease = stored_lease(&row)?;
        if lease::is_idle(&lease, idle, now) && leases.delete_unchanged(&row) {
            deleted += 1;
            fence = lease.fence.max(fence);
        }
        Ok(deleted < limit)
    })?;
    if deleted > 0 {
        let highest = highest(&floors)?;
        if fence > highest {
            floors.insert(&[Value::Long(fence), Value::Moment(now)]);
            floors.scan(|row| {
                let old = row.long(floor::PURGED_AT)? <= now - FLOORS_STAY;
                if old && row.long(floor::FENCE)? < highest {
                    floors.delete_unchanged(&row);
                }
                Ok(true)
            })?;
        }
    }
    floors.close(deleted > 0);
    leases.close(deleted > 0);
    Ok(deleted)
}

fn stored_lease(row: &Row) -> Result<Lease, Error> {
    Ok(Lease {
        token: row.token_or_null(column::TOKEN),
        fence: row.long(column::FENCE)?,
        expires_at: row.long(column::EXPIRES_AT)?,
    })
}
