//! Emptying a table as a whole, as TRUNCATE does, if nobody is at it: no lock is waited for.
//!
//! Taken are the table, its indexes, its TOAST table and the index of that: an autovacuum of any of them is a reason to come back
//! later. The table's files are replaced by empty ones in this transaction, so a rollback or a crash at any point
//! leaves it as it was; the old files go after COMMIT, when the locks have gone.

use super::lock::owned_by_transaction;
use super::table::{Access, Definition, Table, indexes};
use super::trap::trap;
use idem_core::error::Error;
use pgrx::pg_sys;
use std::ptr::null_mut;

/// Empties `table` unless somebody else uses it or `due`, asked when nobody else can, says no; returns its answer.
pub fn truncate<T>(
    table: &Definition,
    function: pg_sys::Oid,
    due: impl FnOnce(&Table) -> Result<Option<T>, Error>,
) -> Result<Option<T>, Error> {
    let Some(table) = Table::open_alone(table, function)? else { return Ok(None) };
    // SAFETY: the relation is open and locked, the relations of `parts` are its own, so they stay.
    unsafe {
        let relation = table.relation;
        // Also used by a query of this very session, such as one that reads a view: it would find its table gone.
        let used_here = (*relation).rd_refcnt > 1;
        let Some(parts) = (if used_here { None } else { lock_parts(relation) }) else {
            table.close(false);
            return Ok(None);
        };
        let Some(answer) = due(&table)? else {
            unlock(&parts);
            table.close(false);
            return Ok(None);
        };
        let relations = pg_sys::lappend(null_mut(), relation.cast());
        let oids = pg_sys::lappend_oid(null_mut(), table.oid);
        // As RelationIsLogicallyLogged, for a table that is neither temporary nor of the system.
        let is_decoded = pg_sys::wal_level >= pg_sys::WalLevel::WAL_LEVEL_LOGICAL as i32
            && (*(*relation).rd_rel).relpersistence as u8 == pg_sys::RELPERSISTENCE_PERMANENT;
        let decoded =
            if is_decoded { pg_sys::lappend_oid(null_mut(), table.oid) } else { null_mut() };
        let restrict = pg_sys::DropBehavior::DROP_RESTRICT;
        trap(|raw| {
            #[cfg(feature = "pg15")]
            raw.ExecuteTruncateGuts(relations, oids, decoded, restrict, false);
            #[cfg(not(feature = "pg15"))]
            raw.ExecuteTruncateGuts(relations, oids, decoded, restrict, false, false);
        });
        pg_sys::CommandCounterIncrement();
        table.close(true);
        Ok(Some(answer))
    }
}

/// Locks the indexes of `relation`, its TOAST table and the indexes of that; `None` if one of them is in use.
///
/// # Safety
/// `relation` is open and locked.
unsafe fn lock_parts(relation: pg_sys::Relation) -> Option<Vec<pg_sys::Oid>> {
    let mut locked = Vec::new();
    // SAFETY: the relations are open, their lists of indexes are copies.
    unsafe {
        let mut parts = indexes(relation);
        let toast = (*(*relation).rd_rel).reltoastrelid;
        if toast != pg_sys::InvalidOid {
            // First, so that its list of indexes is final.
            if !try_lock(toast) {
                return None;
            }
            locked.push(toast);
            let toast = pg_sys::table_open(toast, pg_sys::NoLock as pg_sys::LOCKMODE);
            parts.extend(indexes(toast));
            pg_sys::table_close(toast, pg_sys::NoLock as pg_sys::LOCKMODE);
        }
        for part in parts {
            if !try_lock(part) {
                unlock(&locked);
                return None;
            }
            locked.push(part);
        }
    }
    Some(locked)
}

fn try_lock(relation: pg_sys::Oid) -> bool {
    let mode = Access::Alone as pg_sys::LOCKMODE;
    // SAFETY: locking is by OID.
    unsafe {
        trap(|raw| owned_by_transaction(raw, || raw.ConditionalLockRelationOid(relation, mode)))
    }
}

fn unlock(relations: &[pg_sys::Oid]) {
    let mode = Access::Alone as pg_sys::LOCKMODE;
    for relation in relations {
        // SAFETY: locked by `try_lock`.
        unsafe {
            trap(|raw| owned_by_transaction(raw, || raw.UnlockRelationOid(*relation, mode)));
        }
    }
}
