//! The C functions of the hot path, called without a guard of their own.
//!
//! pgrx's bindings set up a `sigsetjmp` around every C function, 81 of them in a fresh transaction.
//! Here one [`trap`](super::trap::trap) stands around a whole look or write, and an error jumps over
//! the Rust frames within it. That is sound as long as these frames have nothing to do when they are
//! left. So, **in the body of a `trap`, and in all that it calls: nothing that has to be dropped, and
//! no panic**. Numbers, pointers and arrays of them are fine, and what lies in PostgreSQL's memory
//! contexts; a `Vec`, a `String`, a guard, a binding of pgrx's (its guard panics) are not.
//!
//! The compiler holds two sides of this: a [`Raw`] comes from `trap` only, so that nothing here can be called
//! without one, and `trap` refuses a body that has captured something to drop.

use pgrx::pg_sys::*;
use std::ffi::{c_int, c_void};

/// Proof that a `trap` stands around the call in progress.
#[derive(Clone, Copy)]
pub struct Raw(());

impl Raw {
    /// # Safety
    /// Only `trap` may call this.
    pub(super) unsafe fn within_trap() -> Raw {
        Raw(())
    }
}

macro_rules! raw {
    ($($(#[$when:meta])* fn $name:ident($($argument:ident: $type:ty),*) $(-> $result:ty)?;)*) => {
        mod c {
            use super::*;
            unsafe extern "C-unwind" {
                $($(#[$when])* pub fn $name($($argument: $type),*) $(-> $result)?;)*
            }
        }

        /// Each is the C function of this name, with what it expects and promises.
        #[allow(non_snake_case, clippy::missing_safety_doc, clippy::too_many_arguments)]
        impl Raw {
            $($(#[$when])*
            #[inline(always)]
            pub unsafe fn $name(self, $($argument: $type),*) $(-> $result)? {
                // SAFETY: passed on from the caller; an error jumps to the trap around it.
                unsafe { c::$name($($argument),*) }
            })*
        }
    };
}

raw! {
    // Locks.
    fn LockAcquire(tag: *const LOCKTAG, mode: LOCKMODE, session: bool, dont_wait: bool) -> LockAcquireResult::Type;
    fn LockRelease(tag: *const LOCKTAG, mode: LOCKMODE, session: bool) -> bool;
    fn LockRelationOid(relation: Oid, mode: LOCKMODE);
    fn ConditionalLockRelationOid(relation: Oid, mode: LOCKMODE) -> bool;
    fn UnlockRelationOid(relation: Oid, mode: LOCKMODE);

    // Tables.
    fn AcceptInvalidationMessages();
    fn RelationIdGetRelation(relation: Oid) -> Relation;
    fn RelationClose(relation: Relation);
    fn table_open(relation: Oid, mode: LOCKMODE) -> Relation;
    fn table_close(relation: Relation, mode: LOCKMODE);
    fn index_open(index: Oid, mode: LOCKMODE) -> Relation;
    fn index_close(index: Relation, mode: LOCKMODE);
    fn RelationGetNumberOfBlocksInFork(relation: Relation, fork: ForkNumber::Type) -> BlockNumber;
    #[cfg(feature = "pg18")]
    fn RelationGetPrimaryKeyIndex(relation: Relation, deferrable: bool) -> Oid;
    #[cfg(not(feature = "pg18"))]
    fn RelationGetPrimaryKeyIndex(relation: Relation) -> Oid;

    // Reading.
    fn ScanKeyInit(entry: ScanKey, column: AttrNumber, strategy: StrategyNumber, function: RegProcedure, argument: Datum);
    #[cfg(feature = "pg18")]
    fn index_beginscan(table: Relation, index: Relation, snapshot: Snapshot, statistics: *mut IndexScanInstrumentation, keys: c_int, orders: c_int) -> IndexScanDesc;
    #[cfg(not(feature = "pg18"))]
    fn index_beginscan(table: Relation, index: Relation, snapshot: Snapshot, keys: c_int, orders: c_int) -> IndexScanDesc;
    fn index_rescan(scan: IndexScanDesc, keys: ScanKey, count: c_int, orders: ScanKey, order_count: c_int);
    fn index_getnext_tid(scan: IndexScanDesc, direction: ScanDirection::Type) -> ItemPointer;
    fn index_fetch_heap(scan: IndexScanDesc, slot: *mut TupleTableSlot) -> bool;
    fn index_endscan(scan: IndexScanDesc);
    fn table_slot_create(table: Relation, list: *mut *mut List) -> *mut TupleTableSlot;
    fn ExecDropSingleTupleTableSlot(slot: *mut TupleTableSlot);
    fn heap_deform_tuple(tuple: HeapTuple, descriptor: TupleDesc, values: *mut Datum, nulls: *mut bool);
    fn pg_detoast_datum_packed(value: *mut varlena) -> *mut varlena;

    // Writing.
    fn heap_form_tuple(descriptor: TupleDesc, values: *const Datum, nulls: *const bool) -> HeapTuple;
    fn simple_heap_insert(table: Relation, tuple: HeapTuple);
    #[cfg(feature = "pg15")]
    fn heap_update(table: Relation, place: ItemPointer, tuple: HeapTuple, command: CommandId, crosscheck: Snapshot, wait: bool, failure: *mut TM_FailureData, lock: *mut LockTupleMode::Type) -> TM_Result::Type;
    #[cfg(not(feature = "pg15"))]
    fn heap_update(table: Relation, place: ItemPointer, tuple: HeapTuple, command: CommandId, crosscheck: Snapshot, wait: bool, failure: *mut TM_FailureData, lock: *mut LockTupleMode::Type, indexes: *mut TU_UpdateIndexes::Type) -> TM_Result::Type;
    fn GetCurrentCommandId(used: bool) -> CommandId;
    fn index_insert(index: Relation, values: *mut Datum, nulls: *mut bool, place: ItemPointer, table: Relation, unique: IndexUniqueCheck::Type, unchanged: bool, info: *mut IndexInfo) -> bool;
    fn CommandCounterIncrement();
    #[cfg(feature = "pg15")]
    fn ExecuteTruncateGuts(tables: *mut List, oids: *mut List, decoded: *mut List, behaviour: DropBehavior::Type, restart: bool);
    #[cfg(not(feature = "pg15"))]
    fn ExecuteTruncateGuts(tables: *mut List, oids: *mut List, decoded: *mut List, behaviour: DropBehavior::Type, restart: bool, as_owner: bool);
    fn ExecComputeStoredGenerated(result: *mut ResultRelInfo, state: *mut EState, slot: *mut TupleTableSlot, command: CmdType::Type);

    // Memory and results.
    fn palloc(size: Size) -> *mut c_void;
    fn pfree(place: *mut c_void);
    fn HeapTupleHeaderGetDatum(tuple: HeapTupleHeader) -> Datum;
}

/// Functions that raise nothing, whatever happens: they need no trap.
pub mod quiet {
    use pgrx::pg_sys::{SubTransactionId, TimestampTz};

    unsafe extern "C-unwind" {
        pub safe fn GetCurrentTimestamp() -> TimestampTz;
        pub safe fn GetCurrentSubTransactionId() -> SubTransactionId;
        pub safe fn IsInParallelMode() -> bool;
    }
}
