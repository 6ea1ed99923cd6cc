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
//! **Writes** of a table as it was made go straight into heap and primary key. If an administrator
//! changed it ([`Table::is_plain`]) they go through the table access method and the executor's index
//! maintenance, so that added indexes (on expressions, partial), columns and constraints are kept. Triggers,
//! rules, foreign keys and row security do not apply to these tables.
//!
//! **Which table.** The tables lie in the schema of the SQL function that was called. OIDs are cached
//! until PostgreSQL reports a change of the tables (ALTER, DROP EXTENSION); the index is
//! always the primary key of the moment, so that REINDEX CONCURRENTLY may swap it.
//!
//! **Relation locks** are owned by the transaction (see `lock.rs`): a table that was only looked at is
//! unlocked at once, one that was or will be written stays locked until the transaction ends, and its
//! primary key with it: that spares the next call the lock manager.

use super::fmgr::{Value, Varlena};
use super::lock::owned_by_transaction;
use super::raw::Raw;
use super::trap::trap;
use idem_core::error::Error;
use idem_core::{Micros, Moment, Token};
use pgrx::pg_sys;
use std::cell::Cell;
use std::ffi::CStr;
use std::ptr::null_mut;

/// A table of the extension: its name and the types of its first columns.
pub struct Definition {
    pub name: &'static CStr,
    pub columns: &'static [pg_sys::BuiltinOid],
    /// Its place in the cache.
    pub slot: usize,
}

/// How many tables there are: the places in the cache.
pub const TABLES: usize = 14;

/// What a table is opened for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Access {
    Read = pg_sys::AccessShareLock as isize,
    Write = pg_sys::RowExclusiveLock as isize,
    /// Nobody else has it open to be written.
    Still = pg_sys::ShareLock as isize,
    /// Nobody else has it open for this, or for more.
    Maintain = pg_sys::ShareUpdateExclusiveLock as isize,
    /// Nobody else has it open at all.
    Alone = pg_sys::AccessExclusiveLock as isize,
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
    static CHANGES: Cell<u64> = const { Cell::new(0) };
}

/// A number that is another as soon as this session knows of a change of one of the tables. What others have changed it
/// gets to know when it locks a table, or another lock was waited for.
pub fn changes() -> u64 {
    CHANGES.get()
}

unsafe extern "C-unwind" fn on_relcache_change(_: pg_sys::Datum, relation: pg_sys::Oid) {
    let all = relation == pg_sys::InvalidOid;
    let mut oids = OIDS.get();
    for oid in oids.iter_mut().filter(|oid| all || **oid == relation) {
        *oid = pg_sys::InvalidOid;
        CHANGES.set(CHANGES.get() + 1);
    }
    OIDS.set(oids);
}

fn remember(table: &Definition, oid: pg_sys::Oid) {
    let mut oids = OIDS.get();
    oids[table.slot] = oid;
    OIDS.set(oids);
}

/// The OID of `table`, which lies in the schema of the SQL function `function`. `None` if to find out would need waiting
/// for others, unless it is to `wait`.
fn resolve(
    table: &Definition,
    function: pg_sys::Oid,
    wait: bool,
) -> Result<Option<pg_sys::Oid>, Error> {
    let known = OIDS.get()[table.slot];
    if known != pg_sys::InvalidOid {
        return Ok(Some(known));
    }
    let mode = Access::Read as pg_sys::LOCKMODE;
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
        if !wait && !pg_sys::ConditionalLockRelationOid(oid, mode) {
            return Ok(None);
        }
        // Remembered before the check: a change reported meanwhile makes it unknown again.
        remember(table, oid);
        let relation = pg_sys::try_relation_open(oid, mode);
        if !wait {
            pg_sys::UnlockRelationOid(oid, mode);
        }
        if relation.is_null() {
            remember(table, pg_sys::InvalidOid);
            return Err(Error::OtherVersion { found: "A table of the extension is missing." });
        }
        let fits = has_columns(relation, table.columns);
        pg_sys::table_close(relation, mode);
        if !fits {
            remember(table, pg_sys::InvalidOid);
            return Err(Error::OtherVersion {
                found: "A table of the extension has not the columns the library expects.",
            });
        }
        Ok(Some(oid))
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

/// How often, and with which pauses, a table is tried for that nobody else may have open: looks take microseconds, but
/// there are many.
const TRIES: u32 = 40;
const PAUSE: Micros = 500;

/// Which of the `tables` that are given have not a single block, and so no row, at a moment after the call began: much
/// cheaper to ask than to open them. For who holds a key's lock that is as good as a look.
///
/// They are not locked for that, so their files may be replaced meanwhile. Whoever replaces a table's file
/// announces that before the old file is cut down to nothing: if nothing is announced *after* the file was found
/// empty, it was the table's own.
pub fn are_empty<const N: usize>(
    tables: [Option<&Definition>; N],
    function: pg_sys::Oid,
) -> Result<[bool; N], Error> {
    let mut oids = [pg_sys::InvalidOid; N];
    for (oid, table) in oids.iter_mut().zip(tables) {
        if let Some(table) = table {
            *oid = resolve(table, function, true)?.expect("it is waited for");
        }
    }
    // SAFETY: the body owns nothing to drop and does not panic.
    unsafe {
        Ok(trap(|raw| {
            raw.AcceptInvalidationMessages();
            let mut empty = [false; N];
            for (empty, oid) in empty.iter_mut().zip(oids) {
                if oid == pg_sys::InvalidOid {
                    continue;
                }
                let relation = raw.RelationIdGetRelation(oid);
                if !relation.is_null() {
                    let fork = pg_sys::ForkNumber::MAIN_FORKNUM;
                    *empty = raw.RelationGetNumberOfBlocksInFork(relation, fork) == 0;
                    raw.RelationClose(relation);
                }
            }
            raw.AcceptInvalidationMessages();
            let known = OIDS.get();
            for ((empty, oid), table) in empty.iter_mut().zip(oids).zip(tables) {
                *empty &= table.is_some_and(|table| known[table.slot] == oid);
            }
            empty
        }))
    }
}

/// An open table, and its primary key if its rows can be read or written. It must be closed once with
/// [`Table::close`]; after an error PostgreSQL does that.
#[derive(Clone, Copy)]
pub struct Table {
    pub(super) relation: pg_sys::Relation,
    pub(super) oid: pg_sys::Oid,
    /// NULL if the table was opened to be maintained as a whole.
    index: pg_sys::Relation,
    access: Access,
}

/// How a table stands.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct State {
    /// The number of its file, another after TRUNCATE or a rewrite.
    pub file: i64,
    pub blocks: i64,
    /// How many rows were inserted and updated, by what PostgreSQL's statistics have heard.
    pub written: i64,
}

/// What trying to open a table led to.
enum Opened {
    Open(Table),
    /// That needs waiting for others.
    Busy,
    /// The table is another one by now, or has changed.
    Changed,
    NoPrimaryKey,
}

impl Table {
    /// Opens and locks `table`, which lies in the schema of the SQL function `function`.
    pub fn open(table: &Definition, function: pg_sys::Oid, access: Access) -> Result<Table, Error> {
        Ok(Table::open_with(table, function, access, true)?.expect("the locks are waited for"))
    }

    /// As [`Table::open`], but `None` if that needs waiting for others.
    pub fn try_open(
        table: &Definition,
        function: pg_sys::Oid,
        access: Access,
    ) -> Result<Option<Table>, Error> {
        Table::open_with(table, function, access, false)
    }

    /// Opens a table that nobody else has open, and that nobody will before this transaction ends; `None` if somebody has
    /// it open for longer than a look.
    pub fn open_alone(table: &Definition, function: pg_sys::Oid) -> Result<Option<Table>, Error> {
        let mut tries = 1;
        loop {
            match Table::try_open(table, function, Access::Alone)? {
                None if tries < TRIES => {
                    tries += 1;
                    super::pause(PAUSE);
                }
                outcome => return Ok(outcome),
            }
        }
    }

    fn open_with(
        table: &Definition,
        function: pg_sys::Oid,
        access: Access,
        wait: bool,
    ) -> Result<Option<Table>, Error> {
        loop {
            let Some(oid) = resolve(table, function, wait)? else { return Ok(None) };
            // SAFETY: the body owns nothing to drop and does not panic.
            let opened = unsafe {
                trap(|raw| owned_by_transaction(raw, || open_by_oid(raw, table, oid, access, wait)))
            };
            match opened {
                Opened::Open(table) => return Ok(Some(table)),
                Opened::Busy => return Ok(None),
                Opened::Changed => {}
                Opened::NoPrimaryKey => {
                    return Err(Error::OtherVersion {
                        found: "A table of the extension has no primary key.",
                    });
                }
            }
        }
    }

    /// Locks a table that was opened for reading for writing too, until the transaction ends.
    pub fn lock_for_writing(&self) {
        if self.access == Access::Read {
            // SAFETY: the relation is open.
            unsafe {
                let mode = Access::Write as pg_sys::LOCKMODE;
                trap(|raw| owned_by_transaction(raw, || raw.LockRelationOid(self.oid, mode)));
            }
        }
    }

    /// Whether it was opened to be written.
    pub fn is_for_writing(&self) -> bool {
        self.access == Access::Write
    }

    /// Closes the table. Its lock stays until the transaction ends if it was or will be written.
    pub fn close(self, keep_lock: bool) {
        let mode = if keep_lock { pg_sys::NoLock as i32 } else { self.access as i32 };
        // SAFETY: both relations are open, with locks that `open` took.
        unsafe {
            trap(|raw| {
                owned_by_transaction(raw, || {
                    if !self.index.is_null() {
                        raw.index_close(self.index, mode);
                    }
                    raw.table_close(self.relation, mode);
                })
            });
        }
    }

    /// How many blocks of [`pg_sys::BLCKSZ`] bytes the rows take, without what lies outside them.
    pub fn blocks(&self) -> u32 {
        // SAFETY: the relation is open.
        unsafe {
            pg_sys::RelationGetNumberOfBlocksInFork(self.relation, pg_sys::ForkNumber::MAIN_FORKNUM)
        }
    }

    /// How it stands: equal if nothing was added meanwhile.
    pub fn state(&self) -> State {
        let count = |function: u32| {
            // SAFETY: built-in functions of one oid, which return a bigint.
            unsafe {
                let function = pg_sys::Oid::from(function);
                let oid = pg_sys::Datum::from(self.oid);
                pg_sys::OidFunctionCall1Coll(function, pg_sys::InvalidOid, oid).value() as i64
            }
        };
        // SAFETY: the relation is open.
        #[cfg(feature = "pg15")]
        let file = unsafe { (*self.relation).rd_node.relNode };
        #[cfg(not(feature = "pg15"))]
        // SAFETY: the relation is open.
        let file = unsafe { (*self.relation).rd_locator.relNumber };
        State {
            file: i64::from(file.to_u32()),
            blocks: i64::from(self.blocks()),
            written: count(pg_sys::F_PG_STAT_GET_TUPLES_INSERTED)
                + count(pg_sys::F_PG_STAT_GET_TUPLES_UPDATED),
        }
    }

    /// Whether the table has not a single block, and so no row: much cheaper to ask than to scan its index.
    pub fn is_empty(&self) -> bool {
        self.blocks() == 0
    }

    /// About how many rows it has: what the statistics count or, if they were lost in a crash, what its size suggests.
    pub fn estimated_rows(&self) -> u64 {
        // SAFETY: a built-in function of one oid, which returns a bigint; the relation is open, the widths of
        // its columns are not asked for.
        unsafe {
            let counted = pg_sys::OidFunctionCall1Coll(
                pg_sys::Oid::from(pg_sys::F_PG_STAT_GET_LIVE_TUPLES),
                pg_sys::InvalidOid,
                pg_sys::Datum::from(self.oid),
            );
            if counted.value() as i64 > 0 {
                return counted.value() as u64;
            }
            let (mut pages, mut rows, mut visible) = (0, 0.0, 0.0);
            let widths = null_mut();
            pg_sys::estimate_rel_size(self.relation, widths, &mut pages, &mut rows, &mut visible);
            rows as u64
        }
    }

    /// The row whose first column is `digest`.
    pub fn find(&self, digest: &[u8; 16], view: &View) -> Option<Row> {
        // SAFETY: both relations are open; the body owns nothing to drop and does not panic.
        unsafe { trap(|raw| self.scan_for(raw, digest, view.0)) }
    }

    /// # Safety
    /// Within a trap: nothing to drop, no panic.
    unsafe fn scan_for(
        &self,
        raw: Raw,
        digest: &[u8; 16],
        snapshot: pg_sys::Snapshot,
    ) -> Option<Row> {
        use pg_sys::ScanDirection::ForwardScanDirection;
        let none = null_mut();
        // SAFETY: the scan key points to `digest`, which outlives the scan; the slot is of the table's
        // shape; the tuple is copied before the scan ends.
        unsafe {
            let mut key = pg_sys::ScanKeyData::default();
            raw.ScanKeyInit(
                &mut key,
                1,
                pg_sys::BTEqualStrategyNumber as pg_sys::StrategyNumber,
                pg_sys::Oid::from(pg_sys::F_UUID_EQ),
                pg_sys::Datum::from(digest.as_ptr()),
            );
            #[cfg(feature = "pg18")]
            let scan = raw.index_beginscan(self.relation, self.index, snapshot, null_mut(), 1, 0);
            #[cfg(not(feature = "pg18"))]
            let scan = raw.index_beginscan(self.relation, self.index, snapshot, 1, 0);
            raw.index_rescan(scan, &mut key, 1, none, 0);
            // A slot is only made for a key that is there.
            let mut slot: *mut pg_sys::TupleTableSlot = null_mut();
            let mut row = None;
            while !raw.index_getnext_tid(scan, ForwardScanDirection).is_null() {
                if slot.is_null() {
                    slot = raw.table_slot_create(self.relation, null_mut());
                }
                if raw.index_fetch_heap(scan, slot)
                    && let Some(copy) = (*(*slot).tts_ops).copy_heap_tuple
                {
                    row = Some(self.row(raw, copy(slot)));
                    break;
                }
            }
            raw.index_endscan(scan);
            if !slot.is_null() {
                raw.ExecDropSingleTupleTableSlot(slot);
            }
            row
        }
    }

    /// Shows `visit` the rows, as long as it says so: the newest state of each. A row that is updated meanwhile
    /// may be shown twice or not at all.
    pub fn scan(&self, visit: impl FnMut(Row) -> Result<bool, Error>) -> Result<(), Error> {
        // SAFETY: an invalid index means the table itself.
        unsafe { self.scan_by(pg_sys::InvalidOid, &mut [], visit) }
    }

    /// As [`Table::scan`], but only rows whose `column` (a timestamptz with an index of its own) is at most `until`.
    pub fn scan_until(
        &self,
        column: usize,
        until: Moment,
        visit: impl FnMut(Row) -> Result<bool, Error>,
    ) -> Result<(), Error> {
        let number = column as pg_sys::AttrNumber + 1;
        let mut key = pg_sys::ScanKeyData::default();
        // SAFETY: the scan key is a local; the index was found among those of the relation.
        unsafe {
            let Some(index) = index_on(self.relation, number) else {
                return Err(Error::OtherVersion {
                    found: "A table of the extension has lost an index.",
                });
            };
            pg_sys::ScanKeyInit(
                &mut key,
                number,
                pg_sys::BTLessEqualStrategyNumber as pg_sys::StrategyNumber,
                pg_sys::Oid::from(pg_sys::F_TIMESTAMPTZ_LE),
                pg_sys::Datum::from(until),
            );
            self.scan_by(index, std::slice::from_mut(&mut key), visit)
        }
    }

    /// # Safety
    /// `index` is one of the table's that serves the keys, or there are none and it is invalid.
    unsafe fn scan_by(
        &self,
        index: pg_sys::Oid,
        keys: &mut [pg_sys::ScanKeyData],
        mut visit: impl FnMut(Row) -> Result<bool, Error>,
    ) -> Result<(), Error> {
        // SAFETY: the relation is open; each tuple is copied before the next one is fetched.
        unsafe {
            let scan = pg_sys::systable_beginscan(
                self.relation,
                index,
                index != pg_sys::InvalidOid,
                &raw mut pg_sys::SnapshotSelfData,
                keys.len() as i32,
                keys.as_mut_ptr(),
            );
            loop {
                super::check_for_interrupts();
                let tuple = pg_sys::systable_getnext(scan);
                if tuple.is_null() {
                    break;
                }
                let copy = pg_sys::heap_copytuple(tuple);
                let row = trap(|raw| self.row(raw, copy));
                let goes_on = visit(row)?;
                pg_sys::pfree(row.values.cast_mut().cast());
                pg_sys::pfree(copy.cast());
                if !goes_on {
                    break;
                }
            }
            pg_sys::systable_endscan(scan);
        }
        Ok(())
    }

    /// # Safety
    /// Within a trap; `tuple` is a row of this table, copied from its place.
    unsafe fn row(&self, raw: Raw, tuple: pg_sys::HeapTuple) -> Row {
        // SAFETY: the arrays have as many places as the descriptor has columns.
        unsafe {
            let place = (*tuple).t_self;
            let written_by = (*(*tuple).t_data).t_choice.t_heap.t_xmin;
            let descriptor = (*self.relation).rd_att;
            let columns = (*descriptor).natts as usize;
            let values: *mut pg_sys::Datum =
                raw.palloc(columns * (size_of::<pg_sys::Datum>() + 1)).cast();
            let nulls: *mut bool = values.add(columns).cast();
            raw.heap_deform_tuple(tuple, descriptor, values, nulls);
            Row { place, written_by, columns, values, nulls }
        }
    }

    /// Whether the table is a heap with our columns, without constraints to check, and its only index
    /// the primary key: as `sql/idem.sql` makes it.
    fn is_plain(&self, our_columns: usize) -> bool {
        if self.index.is_null() {
            return false;
        }
        // SAFETY: both relations are open; the list of indexes is valid since the primary key was
        // asked for.
        unsafe {
            let relation = &*self.relation;
            let index = &*(*self.index).rd_index;
            let constraints = (*relation.rd_att).constr;
            relation.rd_indexvalid
                && (*relation.rd_indexlist).length == 1
                && (*relation.rd_att).natts as usize == our_columns
                && our_columns <= MOST_COLUMNS
                && (constraints.is_null()
                    || ((*constraints).num_check == 0 && !(*constraints).has_generated_stored))
                && (*relation.rd_rel).relam == pg_sys::HEAP_TABLE_AM_OID
                && (*(*self.index).rd_rel).relam == pg_sys::BTREE_AM_OID
                && index.indnatts == 1
                && index.indimmediate
                && index.indisready
        }
    }

    /// Adds a row; columns that an administrator added behind ours become NULL.
    pub fn insert(&self, values: &[Value]) {
        if self.is_plain(values.len()) {
            // SAFETY: the body owns nothing to drop and does not panic.
            unsafe { trap(|raw| self.insert_plainly(raw, values)) };
            return;
        }
        self.write(values, None, |slot| {
            // SAFETY: the relation is open for writing, the slot is of its shape and filled.
            unsafe { pg_sys::simple_table_tuple_insert(self.relation, slot) };
            Some(IndexEntries { update: false, summarizing: false })
        });
    }

    /// # Safety
    /// Within a trap; the table is plain and open for writing.
    unsafe fn insert_plainly(&self, raw: Raw, values: &[Value]) {
        // SAFETY: the tuple is of the table's shape.
        unsafe {
            let mut columns = Columns::new(raw, values);
            let descriptor = (*self.relation).rd_att;
            let tuple =
                raw.heap_form_tuple(descriptor, columns.values.as_ptr(), columns.nulls.as_ptr());
            raw.simple_heap_insert(self.relation, tuple);
            self.insert_index_entry(raw, &mut columns, &mut (*tuple).t_self, false);
            raw.pfree(tuple.cast());
            raw.CommandCounterIncrement();
        }
    }

    /// Adds the entry of a row to the primary key.
    ///
    /// # Safety
    /// Within a trap; the table is plain and open for writing.
    unsafe fn insert_index_entry(
        &self,
        raw: Raw,
        columns: &mut Columns,
        place: &mut pg_sys::ItemPointerData,
        unchanged: bool,
    ) {
        // SAFETY: the index is a btree on the first column alone, which reads nothing of the IndexInfo.
        // A duplicate raises 23505.
        unsafe {
            let mut info =
                pg_sys::IndexInfo { type_: pg_sys::NodeTag::T_IndexInfo, ..std::mem::zeroed() };
            let (values, nulls) = (columns.values.as_mut_ptr(), columns.nulls.as_mut_ptr());
            let unique = pg_sys::IndexUniqueCheck::UNIQUE_CHECK_YES;
            let (index, table) = (self.index, self.relation);
            raw.index_insert(index, values, nulls, place, table, unique, unchanged, &mut info);
        }
    }

    /// Replaces `row`, keeping columns that an administrator added; in place (HOT) as long as no
    /// indexed column changes. False if somebody (a purge) has removed the row; waits for one who is about to. XX001 if
    /// somebody has changed it.
    pub fn update(&self, row: &Row, values: &[Value]) -> Result<bool, Error> {
        if self.is_plain(values.len()) {
            // SAFETY: the body owns nothing to drop and does not panic.
            let result = unsafe { trap(|raw| self.update_plainly(raw, row, values)) };
            return is_there(result);
        }
        let mut there = Ok(true);
        self.write(values, Some(row), |slot| {
            // SAFETY: as for insert.
            let updated = unsafe { update_tuple(self.relation, row.place, slot) };
            there = updated.as_ref().map(Option::is_some).map_err(Error::clone);
            updated.ok().flatten().flatten()
        });
        there
    }

    /// # Safety
    /// As for `insert_plainly`.
    unsafe fn update_plainly(
        &self,
        raw: Raw,
        row: &Row,
        values: &[Value],
    ) -> pg_sys::TM_Result::Type {
        // SAFETY: the tuple is of the table's shape; where the row cannot stay on its page it gets a new
        // index entry.
        unsafe {
            let mut columns = Columns::new(raw, values);
            let mut place = row.place;
            let mut failure = std::mem::zeroed();
            let mut lock_mode = pg_sys::LockTupleMode::LockTupleExclusive;
            let descriptor = (*self.relation).rd_att;
            let tuple =
                raw.heap_form_tuple(descriptor, columns.values.as_ptr(), columns.nulls.as_ptr());
            let (table, command) = (self.relation, raw.GetCurrentCommandId(true));
            let (failure, lock_mode) = (&mut failure, &mut lock_mode);
            #[cfg(feature = "pg15")]
            let result = raw.heap_update(
                table,
                &mut place,
                tuple,
                command,
                null_mut(),
                true,
                failure,
                lock_mode,
            );
            #[cfg(not(feature = "pg15"))]
            let mut indexes = pg_sys::TU_UpdateIndexes::TU_None;
            #[cfg(not(feature = "pg15"))]
            let result = raw.heap_update(
                table,
                &mut place,
                tuple,
                command,
                null_mut(),
                true,
                failure,
                lock_mode,
                &mut indexes,
            );
            let heap_only = (*(*tuple).t_data).t_infomask2 & pg_sys::HEAP_ONLY_TUPLE as u16 != 0;
            if result == pg_sys::TM_Result::TM_Ok && !heap_only {
                self.insert_index_entry(raw, &mut columns, &mut (*tuple).t_self, true);
            }
            raw.pfree(tuple.cast());
            raw.CommandCounterIncrement();
            result
        }
    }

    /// Removes `row`. False if somebody (a purge) has; waits for one who is about to. XX001 if somebody has changed it.
    pub fn delete(&self, row: &Row) -> Result<bool, Error> {
        is_there(self.delete_tuple(row, true))
    }

    /// Removes `row`, which counts no more, unless somebody has changed it, or is about to.
    pub fn delete_unchanged(&self, row: &Row) -> bool {
        self.delete_tuple(row, false) == pg_sys::TM_Result::TM_Ok
    }

    fn delete_tuple(&self, row: &Row, wait: bool) -> pg_sys::TM_Result::Type {
        let mut place = row.place;
        let mut failure = pg_sys::TM_FailureData::default();
        // SAFETY: the relation is open for writing, and so has a table access method.
        unsafe {
            let delete = (*(*self.relation).rd_tableam).tuple_delete.expect("tables have it");
            trap(|raw| {
                let result = delete(
                    self.relation,
                    &mut place,
                    raw.GetCurrentCommandId(true),
                    &raw mut pg_sys::SnapshotSelfData,
                    null_mut(),
                    wait,
                    &mut failure,
                    false,
                );
                raw.CommandCounterIncrement();
                result
            })
        }
    }

    /// Has every session hear of a change when this transaction has committed (see [`changes`]); this one now, and should
    /// the transaction roll back.
    pub fn announce_change(&self) {
        // SAFETY: the relation is open.
        unsafe {
            pg_sys::CacheInvalidateRelcache(self.relation);
            // Messages of a command that fails are dropped; those of earlier ones are heard at the rollback.
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
                    Some(value) => trap(|raw| value.datum(raw)),
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
            pg_sys::InitResultRelInfo(result, self.relation, 0, null_mut(), 0);
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
    // SAFETY: the executor state and the slot are those of the row about to be written. As for an
    // INSERT, all generated columns are computed.
    unsafe {
        let Some(constraints) = (*descriptor).constr.as_ref() else { return };
        if constraints.has_generated_stored {
            let command = pg_sys::CmdType::CMD_INSERT;
            trap(|raw| raw.ExecComputeStoredGenerated(result, estate, slot, command));
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

/// Updates the row at `place` and says which index entries that needs; `None` if it is no longer there; XX001 if it has
/// changed.
unsafe fn update_tuple(
    relation: pg_sys::Relation,
    mut place: pg_sys::ItemPointerData,
    slot: *mut pg_sys::TupleTableSlot,
) -> Result<Option<Option<IndexEntries>>, Error> {
    let mut failure = pg_sys::TM_FailureData::default();
    let mut lock_mode = pg_sys::LockTupleMode::LockTupleExclusive;
    #[cfg(feature = "pg15")]
    let mut which = false;
    #[cfg(not(feature = "pg15"))]
    let mut which = pg_sys::TU_UpdateIndexes::TU_None;
    // SAFETY: the relation is open for writing, and so has a table access method; the slot is of its shape.
    let result = unsafe {
        let update = (*(*relation).rd_tableam).tuple_update.expect("tables have it");
        trap(|raw| {
            update(
                relation,
                &mut place,
                slot,
                raw.GetCurrentCommandId(true),
                &raw mut pg_sys::SnapshotSelfData,
                null_mut(),
                true,
                &mut failure,
                &mut lock_mode,
                &mut which,
            )
        })
    };
    if !is_there(result)? {
        return Ok(None);
    }
    #[cfg(feature = "pg15")]
    return Ok(Some(which.then_some(IndexEntries { update: true, summarizing: false })));
    #[cfg(not(feature = "pg15"))]
    {
        use pg_sys::TU_UpdateIndexes::{TU_None, TU_Summarizing};
        let summarizing = which == TU_Summarizing;
        Ok(Some((which != TU_None).then_some(IndexEntries { update: true, summarizing })))
    }
}

unsafe fn insert_index_entries(
    result: *mut pg_sys::ResultRelInfo,
    slot: *mut pg_sys::TupleTableSlot,
    estate: *mut pg_sys::EState,
    entries: IndexEntries,
) {
    let (none, empty) = (null_mut(), null_mut());
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

/// # Safety
/// Within a trap, with the transaction as resource owner.
unsafe fn open_by_oid(
    raw: Raw,
    table: &Definition,
    oid: pg_sys::Oid,
    access: Access,
    wait: bool,
) -> Opened {
    let mode = access as pg_sys::LOCKMODE;
    // SAFETY: locking is by OID and harmless if the relation is gone; it takes in pending invalidations, after
    // which a cache that still knows the OID proves that it is not. The index is there as long as the table
    // is locked.
    unsafe {
        let lock = |relation| {
            if wait {
                raw.LockRelationOid(relation, mode);
                return true;
            }
            raw.ConditionalLockRelationOid(relation, mode)
        };
        if !lock(oid) {
            return Opened::Busy;
        }
        if OIDS.get()[table.slot] != oid {
            raw.UnlockRelationOid(oid, mode);
            return Opened::Changed;
        }
        let relation = raw.table_open(oid, pg_sys::NoLock as pg_sys::LOCKMODE);
        let open = |index| Opened::Open(Table { relation, oid, index, access });
        if !matches!(access, Access::Read | Access::Write) {
            return open(null_mut());
        }
        #[cfg(feature = "pg18")]
        let primary_key = raw.RelationGetPrimaryKeyIndex(relation, false);
        #[cfg(not(feature = "pg18"))]
        let primary_key = raw.RelationGetPrimaryKeyIndex(relation);
        if primary_key == pg_sys::InvalidOid {
            raw.table_close(relation, mode);
            return Opened::NoPrimaryKey;
        }
        if !lock(primary_key) {
            raw.table_close(relation, mode);
            return Opened::Busy;
        }
        let index = raw.index_open(primary_key, pg_sys::NoLock as pg_sys::LOCKMODE);
        if *(*(*index).rd_index).indkey.values.as_ptr() != 1 {
            raw.index_close(index, mode);
            raw.table_close(relation, mode);
            return Opened::NoPrimaryKey;
        }
        open(index)
    }
}

/// Whether the row that was to be written was there. Nobody else writes rows of a key, but a purge removes them.
fn is_there(result: pg_sys::TM_Result::Type) -> Result<bool, Error> {
    match result {
        pg_sys::TM_Result::TM_Ok => Ok(true),
        pg_sys::TM_Result::TM_Deleted => Ok(false),
        _ => Err(Error::Corrupted {
            found: "A row was changed by somebody else while the caller held its lock.",
        }),
    }
}

/// The values of a row to be written, as C wants them; some point into the [`Value`]s.
struct Columns {
    values: [pg_sys::Datum; MOST_COLUMNS],
    nulls: [bool; MOST_COLUMNS],
}

/// At least as many as any table of the extension has.
const MOST_COLUMNS: usize = 16;

impl Columns {
    fn new(raw: Raw, values: &[Value]) -> Columns {
        let mut columns =
            Columns { values: [pg_sys::Datum::null(); MOST_COLUMNS], nulls: [true; MOST_COLUMNS] };
        let places = columns.values.iter_mut().zip(&mut columns.nulls);
        for (value, (place, null)) in values.iter().zip(places) {
            if let Some(datum) = value.datum(raw) {
                *place = datum;
                *null = false;
            }
        }
        columns
    }
}

/// All indexes of a table.
///
/// # Safety
/// `relation` is open.
pub(super) unsafe fn indexes(relation: pg_sys::Relation) -> Vec<pg_sys::Oid> {
    // SAFETY: the list is a copy in the current memory context; an empty one is a null pointer.
    unsafe {
        let Some(list) = pg_sys::RelationGetIndexList(relation).as_ref() else {
            return Vec::new();
        };
        let cells = std::slice::from_raw_parts(list.elements, list.length as usize);
        cells.iter().map(|cell| cell.oid_value).collect()
    }
}

/// A complete index whose first column is this one.
unsafe fn index_on(relation: pg_sys::Relation, column: pg_sys::AttrNumber) -> Option<pg_sys::Oid> {
    // SAFETY: the relation is open, and with it its indexes can be locked and opened.
    unsafe {
        let mode = pg_sys::AccessShareLock as pg_sys::LOCKMODE;
        indexes(relation).into_iter().find(|oid| {
            let index = pg_sys::index_open(*oid, mode);
            let form = (*index).rd_index;
            let serves = (*form).indisvalid
                && (*(*index).rd_rel).relam == pg_sys::BTREE_AM_OID
                && *(*form).indkey.values.as_slice(1).get_unchecked(0) == column
                && pg_sys::RelationGetIndexPredicate(index).is_null();
            pg_sys::index_close(index, mode);
            serves
        })
    }
}

/// A row that was found: a copy, readable as long as the current call runs. Large values may still
/// lie outside the row and are fetched by [`Row::varlena`], for which the table must still be open.
#[derive(Clone, Copy)]
pub struct Row {
    place: pg_sys::ItemPointerData,
    written_by: pg_sys::TransactionId,
    columns: usize,
    values: *const pg_sys::Datum,
    nulls: *const bool,
}

impl Row {
    /// Whether this transaction wrote it.
    pub fn is_ours(&self) -> bool {
        // SAFETY: any transaction id is allowed.
        unsafe { pg_sys::TransactionIdIsCurrentTransactionId(self.written_by) }
    }

    fn datum(&self, column: usize) -> Option<pg_sys::Datum> {
        assert!(column < self.columns);
        // SAFETY: both arrays have that many places.
        unsafe { (!*self.nulls.add(column)).then(|| *self.values.add(column)) }
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
        self.datum(column).map(|datum| Varlena(datum).detoasted())
    }
}
