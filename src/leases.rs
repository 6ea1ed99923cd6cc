//! Where lease locks are kept: one row per name, which stays when the lock is free, for its fence.
//!
//! Taking, prolonging and unlocking update the row in place; no indexed column ever changes, so a
//! hot name makes no index entries (HOT). Who writes a name's row holds its lock.

use crate::pg::fmgr::{Value, Varlena};
use crate::pg::table::{Access, Definition, Look, Row, Table, View};
use crate::storage::{Key, check_key};
use idem_core::error::Error;
use idem_core::lease::Lease;
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
    slot: 2,
};

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
        let row = self.0.find(&name.identity.digest, &view)?;
        view.close();
        let Some(row) = row else { return Ok(None) };
        check_key(&row, name, column::SCOPE, column::NAME)?;
        let stored = StoredLease {
            lease: Lease {
                token: row.token_or_null(column::TOKEN),
                fence: row.long(column::FENCE)?,
                expires_at: row.long(column::EXPIRES_AT)?,
            },
            acquired_at: row.long(column::ACQUIRED_AT)?,
            ttl: row.micros(column::TTL)?,
            holder: row.varlena(column::HOLDER),
        };
        Ok(Some(Found { stored, row }))
    }

    /// Writes the row of `name` in place of the one that was found. The name's lock is held.
    pub fn put(&self, name: &Key, row: &StoredLease, replaced: Option<&Found>) {
        let values = [
            Value::Token(name.identity.digest),
            row.lease.token.map(Value::Token).into(),
            Value::Long(row.lease.fence),
            Value::Moment(row.acquired_at),
            Value::Moment(row.lease.expires_at),
            Value::Interval(row.ttl),
            Varlena::new(&name.scope).into(),
            Varlena::new(&name.name).into(),
            row.holder.into(),
        ];
        match replaced {
            Some(found) => self.0.update(&found.row, &values),
            None => self.0.insert(&values),
        }
    }
}
