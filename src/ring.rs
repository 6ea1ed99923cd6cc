//! The state of the ring: which segment is the current one, and each one's bound (see `idem_core::ring`).
//!
//! It is a small table, one row a turn, written by `idem_purge` only, and remembered by every session until PostgreSQL
//! reports a change. An old idea of it does no harm: a turn's bound never changes, so what was written to a
//! segment by its bound ends by its bound. And a segment is emptied, and begins a turn, under its exclusive lock: whoever
//! writes to it locks it first, and thereby hears of what happened before.

use crate::pg::fmgr::Value;
use crate::pg::table::{self, Access, Definition, Table};
use idem_core::error::Error;
use idem_core::ring::{Ring, Turn, segment_of};
use pgrx::pg_sys::{self, BuiltinOid::*};
use std::cell::Cell;

/// The columns of `idem_ring`, in order (see sql/idem.sql).
mod column {
    pub const TURN: usize = 0;
    pub const STARTED_AT: usize = 1;
    pub const BOUND: usize = 2;
}

static RING: Definition = Definition {
    name: c"idem_ring",
    columns: &[INT8OID, TIMESTAMPTZOID, TIMESTAMPTZOID],
    slot: 11,
};

/// The ring as somebody read it.
#[derive(Clone, Copy)]
struct Seen {
    ring: Ring,
    /// This transaction has written to it: to others the ring stands as before.
    ours: bool,
}

thread_local! {
    /// The ring as it was last read, and `table::changes()` before that.
    static KNOWN: Cell<Option<(u64, Seen)>> = const { Cell::new(None) };
}

/// The ring, which lies in the schema of the SQL function `function`.
pub fn read(function: pg_sys::Oid) -> Result<Ring, Error> {
    see(function).map(|seen| seen.ring)
}

/// The ring as everybody sees it who hears of all that was committed; `None` while this transaction has turned it.
pub fn read_committed(function: pg_sys::Oid) -> Result<Option<Ring>, Error> {
    see(function).map(|seen| (!seen.ours).then_some(seen.ring))
}

fn see(function: pg_sys::Oid) -> Result<Seen, Error> {
    if let Some((changes, seen)) = KNOWN.get()
        && changes == table::changes()
    {
        return Ok(seen);
    }
    let table = Table::open(&RING, function, Access::Read)?;
    let changes = table::changes();
    let seen = turns(&table)?;
    table.close(false);
    KNOWN.set(Some((changes, seen)));
    Ok(seen)
}

fn turns(table: &Table) -> Result<Seen, Error> {
    let (mut turns, mut ours) = (Vec::new(), false);
    table.scan(|row| {
        ours |= row.is_ours();
        turns.push(Turn {
            number: row.long(column::TURN)?,
            started_at: row.long(column::STARTED_AT)?,
            bound: row.long(column::BOUND)?,
        });
        Ok(true)
    })?;
    Ok(Seen { ring: turns.into_iter().collect(), ours })
}

/// The ring for whoever changes it: nobody else does before this transaction ends.
pub struct Turning {
    table: Table,
    pub ring: Ring,
    /// This transaction has turned it before: to others the ring stands as before.
    pub ours: bool,
}

impl Turning {
    /// `None` if another purge is at it.
    pub fn begin(function: pg_sys::Oid) -> Result<Option<Turning>, Error> {
        let Some(table) = Table::try_open(&RING, function, Access::Maintain)? else {
            return Ok(None);
        };
        let Seen { ring, ours } = turns(&table)?;
        Ok(Some(Turning { table, ring, ours }))
    }

    /// Goes on with `turn`, whose segment is reserved.
    pub fn go_on(&self, turn: Turn) -> Result<(), Error> {
        self.table.insert(&[
            Value::Long(turn.number),
            Value::Moment(turn.started_at),
            Value::Moment(turn.bound),
        ]);
        // The last turns of other segments stay, however old: they say until when what is in them counts.
        self.table.scan(|row| {
            let old = row.long(column::TURN)?;
            if old < turn.number && segment_of(old) == turn.segment() {
                self.table.delete_unchanged(&row);
            }
            Ok(true)
        })?;
        self.table.announce_change();
        Ok(())
    }

    pub fn end(self) {
        self.table.close(true);
    }
}
