//! Filters of the older segments: most keys that a request asks for are new, and a filter says so of a segment without a look
//! into its index, which for a large one costs some microseconds of waiting for memory.
//!
//! `idem_purge` makes them, one a call, and writes down in `idem_filters` where each lies in shared memory (see
//! `pg::memory`) and how its segment stood then. A session believes a filter as long as the segment still stands so.
//!
//! **Why that is right.** A filter is made of a segment whose turn has ended, once nobody has it open to be written: whoever
//! opens it later hears first of the ring, as it was committed, and does not write to it (see `storage.rs`). So keys may go from it, but none come. When
//! its turn comes again, its row here goes in the same transaction, and its file is another. Only SQL could write to it all the same
//! (a data-only restore beside running sessions, logical replication): then it has other blocks, or PostgreSQL's statistics
//! count the rows, which is looked at anew each second, and at each change of a table (statistics: at most once a transaction).

use crate::pg::fmgr::Value;
use crate::pg::memory::Memory;
use crate::pg::table::{self, Access, Definition, State, Table};
use crate::pg::xact::is_autocommit;
use crate::ring;
use crate::storage::SEGMENT;
use idem_core::error::Error;
use idem_core::filter;
use idem_core::ring::{Ring, SEGMENTS};
use idem_core::{Micros, Moment};
use pgrx::pg_sys::{self, BuiltinOid::*};
use std::cell::Cell;

/// The columns of `idem_filters`, in order (see sql/idem.sql).
mod column {
    pub const SEGMENT: usize = 0;
    pub const MEMORY: usize = 1;
    pub const FILE: usize = 2;
    pub const BLOCKS: usize = 3;
    pub const WRITTEN: usize = 4;
}

static FILTERS: Definition = Definition {
    name: c"idem_filters",
    columns: &[INT4OID, INT8OID, INT8OID, INT8OID, INT8OID],
    slot: 13,
};

/// A smaller segment is looked into as quickly; its filter would only take one of the server's pieces of shared memory.
/// The model test has filters of all.
const FEW_BLOCKS: i64 = if cfg!(feature = "test-clock") { 0 } else { 64 };

/// How long what is known of filters is believed.
const BELIEVED_FOR: Micros = 1_000_000;

/// The filters that are right now, by segment.
#[derive(Clone, Copy)]
pub struct Filters([Option<Memory>; SEGMENTS]);

impl Filters {
    const NONE: Filters = Filters([None; SEGMENTS]);

    /// Whether no record with that digest is in the segment.
    pub fn exclude(&self, segment: usize, digest: &[u8; 16]) -> bool {
        self.0[segment].is_some_and(|memory| !filter::may_contain(memory.words(), digest))
    }
}

#[derive(Clone, Copy)]
struct Known {
    /// `table::changes()` when that was found, and the moment.
    changes: u64,
    since: Moment,
    filters: Filters,
}

const NOTHING_KNOWN: Known = Known { changes: u64::MAX, since: 0, filters: Filters::NONE };

thread_local! {
    static KNOWN: Cell<Known> = const { Cell::new(NOTHING_KNOWN) };
    /// What this session has mapped, by segment.
    static MAPPED: Cell<[Option<Memory>; SEGMENTS]> = const { Cell::new([None; SEGMENTS]) };
}

/// The filters of the segments that lie in the schema of the SQL function `function`. They are right unless this session hears
/// of a change of a table that came before (see [`table::changes`]).
pub fn read(function: pg_sys::Oid, now: Moment) -> Result<Filters, Error> {
    loop {
        let changes = table::changes();
        let known = KNOWN.get();
        if known.changes == changes && (0..BELIEVED_FOR).contains(&(now - known.since)) {
            return Ok(known.filters);
        }
        KNOWN.set(NOTHING_KNOWN);
        let filters = find(function)?;
        if table::changes() == changes {
            KNOWN.set(Known { changes, since: now, filters });
        }
    }
}

fn find(function: pg_sys::Oid) -> Result<Filters, Error> {
    let mut filters = Filters::NONE;
    let current = ring::read(function)?.current().map(|turn| turn.segment());
    if let Opened::Open(table) = open(function, Access::Read)? {
        let stored = stored(&table)?;
        table.close(false);
        for Stored { segment, memory, state } in stored {
            if Some(segment) != current
                && let Some(table) = Table::try_open(&SEGMENT[segment], function, Access::Read)?
            {
                if table.state() == state {
                    filters.0[segment] = map(segment, memory);
                }
                table.close(false);
            }
        }
    }
    for (segment, filter) in filters.0.iter().enumerate() {
        if filter.is_none() {
            unmap(segment);
        }
    }
    Ok(filters)
}

fn map(segment: usize, name: i64) -> Option<Memory> {
    let mut mapped = MAPPED.get();
    if mapped[segment].is_none_or(|memory| memory.name() != name) {
        unmap(segment);
        mapped[segment] = Memory::find(name);
        MAPPED.set(mapped);
    }
    mapped[segment]
}

fn unmap(segment: usize) {
    let mut mapped = MAPPED.get();
    if let Some(memory) = mapped[segment].take() {
        MAPPED.set(mapped);
        memory.forget();
    }
}

/// What trying to open the table of filters led to.
enum Opened {
    Open(Table),
    Busy,
    /// The SQL of idem 0.1.0 does not have it.
    Missing,
}

fn open(function: pg_sys::Oid, access: Access) -> Result<Opened, Error> {
    match Table::try_open(&FILTERS, function, access) {
        Ok(Some(table)) => Ok(Opened::Open(table)),
        Ok(None) => Ok(Opened::Busy),
        Err(Error::OtherVersion { .. }) => Ok(Opened::Missing),
        Err(error) => Err(error),
    }
}

/// A filter that was made, and how its segment stood then.
struct Stored {
    segment: usize,
    memory: i64,
    state: State,
}

fn stored(table: &Table) -> Result<Vec<Stored>, Error> {
    let mut all = Vec::new();
    table.scan(|row| {
        let state = State {
            file: row.long(column::FILE)?,
            blocks: row.long(column::BLOCKS)?,
            written: row.long(column::WRITTEN)?,
        };
        let (segment, memory) = (row.int(column::SEGMENT)?, row.long(column::MEMORY)?);
        if let Some(segment) = usize::try_from(segment).ok().filter(|n| *n < SEGMENTS) {
            all.push(Stored { segment, memory, state });
        }
        Ok(true)
    })?;
    Ok(all)
}

/// Makes the filter of one segment that has none and will not be emptied soon, if there is such a segment. Nobody else changes the ring or the filters before
/// this transaction ends, and it has not turned the ring itself. Not within a transaction block: if it is rolled back, the memory
/// stays until the server's end.
pub fn make_one(function: pg_sys::Oid, ring: &Ring, now: Moment) -> Result<(), Error> {
    if !is_autocommit() {
        return Ok(());
    }
    let known = read(function, now)?;
    let Opened::Open(filters) = open(function, Access::Write)? else { return Ok(()) };
    let current = ring.current().map(|turn| turn.segment());
    let mut made = false;
    for (segment, definition) in SEGMENT.iter().enumerate() {
        let over = ring.last(segment).is_some_and(|turn| turn.is_over(now));
        if made || over || Some(segment) == current || known.0[segment].is_some() {
            continue;
        }
        // Who writes to it has known of an older ring since before.
        let Some(still) = Table::try_open(definition, function, Access::Still)? else {
            continue;
        };
        let table = match still.state().blocks > FEW_BLOCKS {
            true => Table::try_open(definition, function, Access::Read)?,
            false => None,
        };
        // From now on others may remove rows again.
        still.close(false);
        if let Some(table) = table {
            made = make(&filters, segment, &table)?;
            table.close(false);
        }
    }
    filters.close(made);
    Ok(())
}

/// False if there is no memory for it.
fn make(filters: &Table, segment: usize, table: &Table) -> Result<bool, Error> {
    let state = table.state();
    let bytes = state.blocks as u64 * u64::from(pg_sys::BLCKSZ);
    let Some(mut memory) = Memory::create(filter::words_for(bytes)) else { return Ok(false) };
    table.scan(|row| {
        filter::insert(memory.words_mut(), &row.token(0)?);
        Ok(true)
    })?;
    remove_from(filters, segment)?;
    filters.insert(&[
        Value::Int(segment as i32),
        Value::Long(memory.name()),
        Value::Long(state.file),
        Value::Long(state.blocks),
        Value::Long(state.written),
    ]);
    filters.announce_change();
    memory.keep();
    Ok(true)
}

/// Removes the filter of a segment, which is being emptied or written to again; false if that would need waiting.
pub fn remove(function: pg_sys::Oid, segment: usize) -> Result<bool, Error> {
    match open(function, Access::Write)? {
        Opened::Open(filters) => {
            remove_from(&filters, segment)?;
            filters.close(true);
            Ok(true)
        }
        Opened::Busy => Ok(false),
        Opened::Missing => Ok(true),
    }
}

fn remove_from(filters: &Table, segment: usize) -> Result<(), Error> {
    filters.scan(|row| {
        if row.int(column::SEGMENT)? == segment as i32 && filters.delete_unchanged(&row) {
            discard(segment, row.long(column::MEMORY)?);
            filters.announce_change();
        }
        Ok(true)
    })
}

/// Gives the memory back when the last session has unmapped it. Should this transaction roll back, the filter is made again.
fn discard(segment: usize, name: i64) {
    match MAPPED.get()[segment].filter(|memory| memory.name() == name) {
        Some(memory) => memory.discard(),
        None => {
            if let Some(memory) = Memory::find(name) {
                memory.discard();
                memory.forget();
            }
        }
    }
}
