//! Reading and writing the extension's tables without SQL.
//!
//! Half the cost of SPI, no predicate locks, and the newest committed state at every isolation
//! level: SERIALIZABLE and REPEATABLE READ included, a look sees what is committed now, as the row
//! locks of PostgreSQL's own UPDATE do.
//!
//! **Which snapshot.** Under the key's lock nobody else writes that key's rows, and
//! [`Look::Newest`] (`SnapshotSelf`: what is committed now, and what this transaction wrote) finds
//! them. Without the lock such a scan can miss a row that is being updated, since each row is judged
//! at another instant: a miss then proves nothing. [`Look::Snapshot`] never misses, but is an ordinary read with
//! predicate locks in SERIALIZABLE.
//!
//! **Writes** go through the table access method and the executor's index maintenance, so that
//! indexes an administrator adds (on expressions, partial) are kept. Triggers, rules, foreign keys
//! and row security do not apply to these tables.
//!
//! **Which table.** The tables lie in the schema of the SQL function that was called. OIDs are cached
//! until PostgreSQL reports a change of the tables (ALTER, DROP EXTENSION); the index is
//! always the primary key of the moment, so that REINDEX CONCURRENTLY may swap it.
//!
//! **Relation locks** are owned by the transaction (see `lock.rs`): a table that was only looked at is
//! unlocked at once, one that was or will be written stays locked until the transaction ends.

use super::fmgr::{Value, Varlena};
use super::lock::owned_by_transaction;
use super::trap::trap;
use idem_core::error::Error;
use idem_core::{Micros, Token};
use pgrx::pg_sys;
use std::cell::Cell;
use std::ffi::CStr;

/// A table of the extension: its name and the types of its first columns.
pub struct Definition {
    pub name: &'static CStr,
    pub columns: &'static [pg_sys::BuiltinOid],
    /// Its place in the cache.
    pub slot: usize,
}

/// How many tables there are: the places in the cache.
pub const TABLES: usize = 3;

/// What a table is opened for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Access {
    Read = pg_sys::AccessShareLock as isize,
    Write = pg_sys::RowExclusiveLock as isize,
}

/// What a look sees. See the head of the file.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Look {
    Newest,
    Snapshot,
}

/// The snapshot of one look, the same for all tables it reads. It must be given back with
/// [`View::close`]; after an error PostgreSQL does that.
pub struct View(pg_sys::Snapshot, Look);

impl View {
    pub fn open(look: Look) -> View {
        // SAFETY: SnapshotSelf is a static; the latest snapshot is registered until `close`.
        let snapshot = match look {
            Look::Newest => &raw mut pg_sys::SnapshotSelfData,
            Look::Snapshot => unsafe { pg_sys::RegisterSnapshot(pg_sys::GetLatestSnapshot()) },
        };
        View(snapshot, look)
    }

    pub fn close(self) {
        if self.1 == Look::Snapshot {
            // SAFETY: registered by `open`.
            unsafe { pg_sys::UnregisterSnapshot(self.0) };
        }
    }
}

thread_local! {
    /// The OIDs of the tables, as far as they are known.
    static OIDS: Cell<[pg_sys::Oid; TABLES]> = const { Cell::new([pg_sys::InvalidOid; TABLES]) };
    static WATCHING: Cell<bool> = const { Cell::new(false) };
}

unsafe extern "C-unwind" fn on_relcache_change(_: pg_sys::Datum, relation: pg_sys::Oid) {
    let all = relation == pg_sys::InvalidOid;
    OIDS.set(OIDS.get().map(|oid| if all || oid == relation { pg_sys::InvalidOid } else { oid }));
}

fn remember(table: &Definition, oid: pg_sys::Oid) {
    let mut oids = OIDS.get();
    oids[table.slot] = oid;
    OIDS.set(oids);
}

/// The OID of `table`, which lies in the schema of the SQL function `function`.
fn resolve(table: &Definition, function: pg_sys::Oid) -> Result<pg_sys::Oid, Error> {
    let known = OIDS.get()[table.slot];
    if known != pg_sys::InvalidOid {
        return Ok(known);
    }
    // SAFETY: catalogue look-ups by valid OIDs and C strings; the callback is a function of this
    // library, which is never unloaded; a table that is dropped meanwhile is not opened.
    unsafe {
        if !WATCHING.replace(true) {
            pg_sys::CacheRegisterRelcacheCallback(Some(on_relcache_change), pg_sys::Datum::null());
        }
        let schema = pg_sys::get_func_namespace(function);
        let oid = pg_sys::get_relname_relid(table.name.as_ptr(), schema);
        if oid == pg_sys::InvalidOid {
            return Err(Error::OtherVersion { found: "A table of the extension is missing." });
        }
        // Remembered before the check: a change reported meanwhile makes it unknown again.
        remember(table, oid);
        let relation = pg_sys::try_relation_open(oid, Access::Read as pg_sys::LOCKMODE);
        if relation.is_null() {
            remember(table, pg_sys::InvalidOid);
            return Err(Error::OtherVersion { found: "A table of the extension is missing." });
        }
        let fits = has_columns(relation, table.columns);
        pg_sys::table_close(relation, Access::Read as pg_sys::LOCKMODE);
        if !fits {
            remember(table, pg_sys::InvalidOid);
            return Err(Error::OtherVersion {
                found: "A table of the extension has not the columns the library expects.",
            });
        }
        Ok(oid)
    }
}

/// Whether the first columns have these types; columns added behind them do not matter.
unsafe fn has_columns(relation: pg_sys::Relation, types: &[pg_sys::BuiltinOid]) -> bool {
    // SAFETY: the relation is open, its descriptor has natts attributes.
    unsafe {
        let descriptor = (*relation).rd_att;
        (*descriptor).natts as usize >= types.len()
            && types.iter().zip(1..).all(|(kind, number)| {
                // A dropped column has no type.
                pg_sys::SPI_gettypeid(descriptor, number) == (*kind).into()
            })
    }
}

/// An open table. It must be closed with [`Table::close`]; after an error PostgreSQL does that.
pub struct Table {
    relation: pg_sys::Relation,
    oid: pg_sys::Oid,
    access: Access,
}

impl Table {
    /// Opens and locks `table`, which lies in the schema of the SQL function `function`.
    pub fn open(table: &Definition, function: pg_sys::Oid, access: Access) -> Result<Table, Error> {
        let mode = access as pg_sys::LOCKMODE;
        loop {
            let oid = resolve(table, function)?;
            // SAFETY: locking is by OID and harmless if the table is gone; it takes in pending
            // invalidations, after which a cache that still knows the OID proves that it is not.
            unsafe {
                owned_by_transaction(|| pg_sys::LockRelationOid(oid, mode));
                if OIDS.get()[table.slot] == oid {
                    let relation = pg_sys::table_open(oid, pg_sys::NoLock as pg_sys::LOCKMODE);
                    return Ok(Table { relation, oid, access });
                }
                owned_by_transaction(|| pg_sys::UnlockRelationOid(oid, mode));
            }
        }
    }

    /// Closes the table. Its lock stays until the transaction ends if it was or will be written.
    pub fn close(self, keep_lock: bool) {
        // SAFETY: the relation is open; the lock was taken by `open`.
        unsafe {
            pg_sys::table_close(self.relation, pg_sys::NoLock as pg_sys::LOCKMODE);
            if !keep_lock {
                let mode = self.access as pg_sys::LOCKMODE;
                owned_by_transaction(|| pg_sys::UnlockRelationOid(self.oid, mode));
            }
        }
    }

    /// Whether the table has not a single block, and so no row: much cheaper to ask than to scan its index.
    pub fn is_empty(&self) -> bool {
        // SAFETY: the relation is open.
        let blocks = unsafe {
            pg_sys::RelationGetNumberOfBlocksInFork(self.relation, pg_sys::ForkNumber::MAIN_FORKNUM)
        };
        blocks == 0
    }

    /// The row whose first column is `digest`.
    pub fn find(&self, digest: &[u8; 16], view: &View) -> Result<Option<Row>, Error> {
        // SAFETY: the relation is open; the scan key points to `digest`, which outlives the scan; the
        // tuple is copied before the scan ends.
        unsafe {
            let index = primary_key(self.relation);
            if index == pg_sys::InvalidOid {
                return Err(Error::OtherVersion {
                    found: "A table of the extension has no primary key.",
                });
            }
            let mut key = pg_sys::ScanKeyData::default();
            pg_sys::ScanKeyInit(
                &mut key,
                1,
                pg_sys::BTEqualStrategyNumber as pg_sys::StrategyNumber,
                pg_sys::Oid::from(pg_sys::F_UUID_EQ),
                pg_sys::Datum::from(digest.as_ptr()),
            );
            let scan = pg_sys::systable_beginscan(self.relation, index, true, view.0, 1, &mut key);
            let tuple = pg_sys::systable_getnext(scan);
            let row = (!tuple.is_null()).then(|| self.row(pg_sys::heap_copytuple(tuple)));
            pg_sys::systable_endscan(scan);
            Ok(row)
        }
    }

    /// # Safety
    /// `tuple` is a tuple of this table in memory that outlives the call in progress.
    unsafe fn row(&self, tuple: pg_sys::HeapTuple) -> Row {
        // SAFETY: the arrays have as many places as the descriptor has columns.
        unsafe {
            let descriptor = (*self.relation).rd_att;
            let columns = (*descriptor).natts as usize;
            let mut values = vec![pg_sys::Datum::null(); columns];
            let mut nulls = vec![false; columns];
            pg_sys::heap_deform_tuple(tuple, descriptor, values.as_mut_ptr(), nulls.as_mut_ptr());
            Row { place: (*tuple).t_self, values, nulls }
        }
    }

    /// Adds a row; columns that an administrator added behind ours become NULL.
    pub fn insert(&self, values: &[Value]) {
        self.write(values, None, |slot| {
            // SAFETY: the relation is open for writing, the slot is of its shape and filled.
            unsafe { pg_sys::simple_table_tuple_insert(self.relation, slot) };
            Some(IndexEntries { update: false, summarizing: false })
        });
    }

    /// Replaces `row`, keeping columns that an administrator added; in place (HOT) as long as no
    /// indexed column changes.
    pub fn update(&self, row: &Row, values: &[Value]) {
        self.write(values, Some(row), |slot| {
            let mut place = row.place;
            // SAFETY: as for insert.
            unsafe { update_tuple(self.relation, &mut place, slot) }
        });
    }

    /// Removes `row`.
    pub fn delete(&self, row: &Row) {
        let mut place = row.place;
        // SAFETY: the relation is open for writing; a row that is not there raises an error.
        unsafe {
            let snapshot = &raw mut pg_sys::SnapshotSelfData;
            pg_sys::simple_table_tuple_delete(self.relation, &mut place, snapshot);
            pg_sys::CommandCounterIncrement();
        }
    }

    /// Fills a slot with `values`, and what is behind them with what `replaced` has there; has
    /// `write_heap` write it, and makes the index entries.
    fn write(
        &self,
        values: &[Value],
        replaced: Option<&Row>,
        write_heap: impl FnOnce(*mut pg_sys::TupleTableSlot) -> Option<IndexEntries>,
    ) {
        // SAFETY: the relation is open for writing; the slot has one place for each column of its
        // descriptor; executor state and slot are freed here, or with their memory context after an
        // error.
        unsafe {
            let descriptor = (*self.relation).rd_att;
            let slot =
                pg_sys::MakeSingleTupleTableSlot(descriptor, &raw const pg_sys::TTSOpsVirtual);
            for column in 0..(*descriptor).natts as usize {
                let datum = match values.get(column) {
                    Some(value) => value.datum(),
                    None => replaced.and_then(|row| row.datum(column)),
                };
                (*slot).tts_values.add(column).write(datum.unwrap_or(pg_sys::Datum::null()));
                (*slot).tts_isnull.add(column).write(datum.is_none());
            }
            pg_sys::ExecStoreVirtualTuple(slot);

            let estate = pg_sys::CreateExecutorState();
            let result =
                pg_sys::palloc0(size_of::<pg_sys::ResultRelInfo>()).cast::<pg_sys::ResultRelInfo>();
            (*result).type_ = pg_sys::NodeTag::T_ResultRelInfo;
            pg_sys::InitResultRelInfo(result, self.relation, 0, std::ptr::null_mut(), 0);
            check_added_constraints(descriptor, values.len(), result, estate, slot);
            if let Some(entries) = write_heap(slot) {
                pg_sys::ExecOpenIndices(result, false);
                insert_index_entries(result, slot, estate, entries);
                pg_sys::ExecCloseIndices(result);
            }
            pg_sys::pfree(result.cast());
            pg_sys::FreeExecutorState(estate);
            pg_sys::ExecDropSingleTupleTableSlot(slot);
            pg_sys::CommandCounterIncrement();
        }
    }
}

/// Computes generated columns and checks constraints that an administrator added: a row that breaks
/// one could not be restored from a dump. Ours are kept by construction.
unsafe fn check_added_constraints(
    descriptor: pg_sys::TupleDesc,
    our_columns: usize,
    result: *mut pg_sys::ResultRelInfo,
    estate: *mut pg_sys::EState,
    slot: *mut pg_sys::TupleTableSlot,
) {
    unsafe extern "C-unwind" {
        // executor/nodeModifyTable.h, which pgrx's bindings leave out.
        fn ExecComputeStoredGenerated(
            result: *mut pg_sys::ResultRelInfo,
            estate: *mut pg_sys::EState,
            slot: *mut pg_sys::TupleTableSlot,
            command: pg_sys::CmdType::Type,
        );
    }
    // SAFETY: the executor state and the slot are those of the row about to be written. As for an
    // INSERT, all generated columns are computed.
    unsafe {
        let Some(constraints) = (*descriptor).constr.as_ref() else { return };
        if constraints.has_generated_stored {
            let command = pg_sys::CmdType::CMD_INSERT;
            trap(|| ExecComputeStoredGenerated(result, estate, slot, command));
        }
        if constraints.num_check > 0 || (*descriptor).natts as usize > our_columns {
            pg_sys::ExecConstraints(result, slot, estate);
        }
    }
}

/// Which index entries a written row needs.
#[derive(Clone, Copy)]
struct IndexEntries {
    update: bool,
    /// Only in indexes that summarize blocks (BRIN); PostgreSQL 16 and later.
    #[cfg_attr(feature = "pg15", allow(dead_code))]
    summarizing: bool,
}

#[cfg(feature = "pg15")]
unsafe fn update_tuple(
    relation: pg_sys::Relation,
    place: &mut pg_sys::ItemPointerData,
    slot: *mut pg_sys::TupleTableSlot,
) -> Option<IndexEntries> {
    let mut update_indexes = false;
    let snapshot = &raw mut pg_sys::SnapshotSelfData;
    // SAFETY: passed on from the caller.
    unsafe {
        pg_sys::simple_table_tuple_update(relation, place, slot, snapshot, &mut update_indexes)
    };
    update_indexes.then_some(IndexEntries { update: true, summarizing: false })
}

#[cfg(not(feature = "pg15"))]
unsafe fn update_tuple(
    relation: pg_sys::Relation,
    place: &mut pg_sys::ItemPointerData,
    slot: *mut pg_sys::TupleTableSlot,
) -> Option<IndexEntries> {
    use pg_sys::TU_UpdateIndexes::{TU_None, TU_Summarizing};
    let mut which = TU_None;
    let snapshot = &raw mut pg_sys::SnapshotSelfData;
    // SAFETY: passed on from the caller.
    unsafe { pg_sys::simple_table_tuple_update(relation, place, slot, snapshot, &mut which) };
    (which != TU_None)
        .then_some(IndexEntries { update: true, summarizing: which == TU_Summarizing })
}

unsafe fn insert_index_entries(
    result: *mut pg_sys::ResultRelInfo,
    slot: *mut pg_sys::TupleTableSlot,
    estate: *mut pg_sys::EState,
    entries: IndexEntries,
) {
    let (none, empty) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: the indices are open; a NIL list of arbiters and no specConflict go with
    // noDupErr = false, which raises 23505 on a duplicate.
    unsafe {
        #[cfg(feature = "pg15")]
        pg_sys::ExecInsertIndexTuples(result, slot, estate, entries.update, false, none, empty);
        #[cfg(not(feature = "pg15"))]
        pg_sys::ExecInsertIndexTuples(
            result,
            slot,
            estate,
            entries.update,
            false,
            none,
            empty,
            entries.summarizing,
        );
    }
}

unsafe fn primary_key(relation: pg_sys::Relation) -> pg_sys::Oid {
    // SAFETY: the relation is open.
    unsafe {
        #[cfg(feature = "pg18")]
        return pg_sys::RelationGetPrimaryKeyIndex(relation, false);
        #[cfg(not(feature = "pg18"))]
        return pg_sys::RelationGetPrimaryKeyIndex(relation);
    }
}

/// A row that was found: a copy, readable as long as the current call runs. Large values may still
/// lie outside the row and are fetched by [`Row::varlena`], for which the table must still be open.
pub struct Row {
    place: pg_sys::ItemPointerData,
    values: Vec<pg_sys::Datum>,
    nulls: Vec<bool>,
}

impl Row {
    fn datum(&self, column: usize) -> Option<pg_sys::Datum> {
        (!self.nulls[column]).then(|| self.values[column])
    }

    /// A NOT NULL column; XX001 if it is NULL all the same.
    fn required(&self, column: usize) -> Result<pg_sys::Datum, Error> {
        self.datum(column)
            .ok_or(Error::Corrupted { found: "A column that must not be NULL is NULL." })
    }

    pub fn token(&self, column: usize) -> Result<Token, Error> {
        // SAFETY: the columns' types were checked when the table was opened: a uuid is 16 bytes.
        self.required(column).map(|datum| unsafe { *datum.cast_mut_ptr::<Token>() })
    }

    /// The token of a column that may be NULL.
    pub fn token_or_null(&self, column: usize) -> Option<Token> {
        // SAFETY: as for `token`.
        self.datum(column).map(|datum| unsafe { *datum.cast_mut_ptr::<Token>() })
    }

    /// A timestamptz or bigint.
    pub fn long(&self, column: usize) -> Result<i64, Error> {
        self.required(column).map(|datum| datum.value() as i64)
    }

    pub fn int(&self, column: usize) -> Result<i32, Error> {
        self.required(column).map(|datum| datum.value() as i32)
    }

    /// An interval that this library wrote: microseconds only.
    pub fn micros(&self, column: usize) -> Result<Micros, Error> {
        // SAFETY: the columns' types were checked when the table was opened.
        self.required(column)
            .map(|datum| unsafe { (*datum.cast_mut_ptr::<pg_sys::Interval>()).time })
    }

    /// A text or bytea column.
    pub fn bytes(&self, column: usize) -> Option<&[u8]> {
        self.datum(column).map(|datum| Varlena(datum).bytes())
    }

    /// A text, bytea or jsonb column, complete.
    pub fn varlena(&self, column: usize) -> Option<Varlena> {
        self.datum(column).map(|datum| Varlena(datum).detached())
    }
}
