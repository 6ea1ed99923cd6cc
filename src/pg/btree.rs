//! Finding a row by its primary key straight in the btree, as PostgreSQL's own check for duplicates does.
//!
//! An index scan is made for many rows: to set one up and to take it down costs as much as to walk down
//! the tree. Here the leaf page stays locked in share mode while the rows behind its entries are looked at, which
//! also keeps VACUUM from giving their places to others. What is seen is `SnapshotSelf`, without predicate
//! locks (see `table.rs`).
//!
//! Unlike a scan this does not mark entries of dead rows, which later look-ups then need not follow. So it
//! gives up where there are many of them, and leaves the key to a scan.

use super::raw::Raw;
use pgrx::pg_sys;
use std::ptr::null_mut;

/// What PostgreSQL searches a btree with (access/nbtree.h); used here for one column.
#[repr(C)]
pub struct ScanInsert {
    heap_key_space: bool,
    all_equal_image: bool,
    any_null_keys: bool,
    next_key: bool,
    /// `pivotsearch` up to PostgreSQL 16, `backward` from 17 on.
    other: bool,
    scan_tid: pg_sys::ItemPointer,
    key_size: std::ffi::c_int,
    scan_keys: [pg_sys::ScanKeyData; 1],
}

/// What stands at the end of a page of a btree (access/nbtree.h).
#[repr(C)]
struct PageOpaque {
    previous: pg_sys::BlockNumber,
    next: pg_sys::BlockNumber,
    level: u32,
    flags: u16,
    cycle: u16,
}

// access/nbtree.h; the kind of an entry is in the bits of its t_info and of its place.
const SHARE: i32 = pg_sys::BUFFER_LOCK_SHARE as i32;
const DELETED_OR_HALF_DEAD: u16 = 1 << 2 | 1 << 4;
const HIGH_KEY: u16 = 1;
const POSTING_LIST: u16 = 0x2000;
const POSTING_COUNT: u16 = 0x0FFF;

/// The most entries of rows that are not there to be followed.
const MOST_DEAD: usize = 8;

/// What a search led to.
pub enum Sought {
    /// A copy of the row.
    Row(pg_sys::HeapTuple),
    Nothing,
    /// Too many entries of dead rows.
    Unknown,
}

/// Whether a table of this kind can be searched: a heap, and a btree on one column.
pub unsafe fn fits(table: pg_sys::Relation, index: pg_sys::Relation) -> bool {
    // SAFETY: both are open.
    unsafe {
        (*(*table).rd_rel).relam == pg_sys::HEAP_TABLE_AM_OID
            && (*(*index).rd_rel).relam == pg_sys::BTREE_AM_OID
            && (*(*index).rd_index).indnkeyatts == 1
    }
}

/// The newest row whose column that `index` is on equals `digest`.
///
/// # Safety
/// Within a trap; both relations are open, and [`fits`] said yes.
pub unsafe fn find(
    raw: Raw,
    table: pg_sys::Relation,
    index: pg_sys::Relation,
    digest: &[u8; 16],
) -> Sought {
    // SAFETY: `leaf` is locked and pinned in all rounds; offsets are within the page; entries of a leaf
    // page behind its high key are rows', with one place or a list of them.
    unsafe {
        count_scan(raw, index);
        let key = raw._bt_mkscankey(index, null_mut());
        (*key).any_null_keys = false;
        (*key).key_size = 1;
        (*key).scan_keys[0].sk_flags &= !(pg_sys::SK_ISNULL as i32);
        (*key).scan_keys[0].sk_argument = pg_sys::Datum::from(digest.as_ptr());

        let mut leaf = pg_sys::InvalidBuffer as pg_sys::Buffer;
        #[cfg(feature = "pg15")]
        let stack = raw._bt_search(index, key, &mut leaf, SHARE, null_mut());
        #[cfg(feature = "pg16")]
        let stack = raw._bt_search(index, table, key, &mut leaf, SHARE, null_mut());
        #[cfg(any(feature = "pg17", feature = "pg18"))]
        let stack = raw._bt_search(index, table, key, &mut leaf, SHARE);
        raw._bt_freestack(stack);

        let mut sought = Sought::Nothing;
        if leaf != pg_sys::InvalidBuffer as pg_sys::Buffer {
            let (mut at, mut equal) = first_at_least(raw, index, key, Page::of(leaf));
            let mut dead = 0;
            'entries: loop {
                let page = Page::of(leaf);
                if at > page.entries() {
                    if page.is_rightmost() || raw._bt_compare(index, key, page.0, HIGH_KEY) != 0 {
                        break;
                    }
                    let Some(right) = next_page(raw, index, &mut leaf) else { break };
                    at = right.first();
                    equal = false;
                    continue;
                }
                if !equal && raw._bt_compare(index, key, page.0, at) != 0 {
                    break;
                }
                for place in page.places(at) {
                    if let Some(tuple) = fetch(raw, table, *place) {
                        sought = Sought::Row(tuple);
                        break 'entries;
                    }
                    dead += 1;
                }
                if dead > MOST_DEAD {
                    sought = Sought::Unknown;
                    break;
                }
                at += 1;
                equal = false;
            }
            raw._bt_relbuf(index, leaf);
        }
        raw.pfree(key.cast());
        sought
    }
}

/// The first entry that is not below the key, and whether it equals it, if it was compared.
unsafe fn first_at_least(
    raw: Raw,
    index: pg_sys::Relation,
    key: *mut ScanInsert,
    page: Page,
) -> (u16, bool) {
    // SAFETY: passed on from the caller.
    unsafe {
        let (mut low, mut high) = (page.first(), page.entries() + 1);
        let mut equal = false;
        while low < high {
            let middle = low + (high - low) / 2;
            let order = raw._bt_compare(index, key, page.0, middle);
            if order > 0 {
                low = middle + 1;
            } else {
                high = middle;
                equal = order == 0;
            }
        }
        (low, equal)
    }
}

/// Moves on to the next page that is in use, which takes the place of `leaf`.
unsafe fn next_page(raw: Raw, index: pg_sys::Relation, leaf: &mut pg_sys::Buffer) -> Option<Page> {
    // SAFETY: passed on from the caller.
    unsafe {
        loop {
            let page = Page::of(*leaf);
            if page.is_rightmost() {
                return None;
            }
            *leaf = raw._bt_relandgetbuf(index, *leaf, (*page.opaque()).next, SHARE);
            let page = Page::of(*leaf);
            if (*page.opaque()).flags & DELETED_OR_HALF_DEAD == 0 {
                return Some(page);
            }
        }
    }
}

/// A copy of the row at `place`, or where its chain of updates leads, as SnapshotSelf sees it.
unsafe fn fetch(
    raw: Raw,
    table: pg_sys::Relation,
    mut place: pg_sys::ItemPointerData,
) -> Option<pg_sys::HeapTuple> {
    // SAFETY: the page is pinned and locked while the row is read. It is pruned as by any scan: that
    // makes room for the next update.
    unsafe {
        let block = block_number(&place);
        let buffer = raw.ReadBuffer(table, block);
        raw.heap_page_prune_opt(table, buffer);
        raw.LockBuffer(buffer, SHARE);
        let mut tuple: pg_sys::HeapTupleData = std::mem::zeroed();
        let snapshot = &raw mut pg_sys::SnapshotSelfData;
        let found = raw.heap_hot_search_buffer(
            &mut place,
            table,
            buffer,
            snapshot,
            &mut tuple,
            null_mut(),
            true,
        );
        let copy = found.then(|| raw.heap_copytuple(&mut tuple));
        raw.UnlockReleaseBuffer(buffer);
        copy
    }
}

/// Shows in `pg_stat_user_indexes`.
unsafe fn count_scan(raw: Raw, index: pg_sys::Relation) {
    // SAFETY: the index is open; its statistics, if there are any, live as long as it is.
    unsafe {
        if (*index).pgstat_info.is_null() {
            if !(*index).pgstat_enabled {
                return;
            }
            raw.pgstat_assoc_relation(index);
        }
        #[cfg(feature = "pg15")]
        {
            (*(*index).pgstat_info).t_counts.t_numscans += 1;
        }
        #[cfg(not(feature = "pg15"))]
        {
            (*(*index).pgstat_info).counts.numscans += 1;
        }
    }
}

fn block_number(place: &pg_sys::ItemPointerData) -> pg_sys::BlockNumber {
    u32::from(place.ip_blkid.bi_hi) << 16 | u32::from(place.ip_blkid.bi_lo)
}

/// A page of a btree, locked and pinned as long as this is used.
#[derive(Clone, Copy)]
struct Page(pg_sys::Page);

impl Page {
    unsafe fn of(buffer: pg_sys::Buffer) -> Page {
        // SAFETY: the buffer is pinned; these tables are not temporary.
        Page(unsafe { pg_sys::BufferBlocks.add((buffer as usize - 1) * pg_sys::BLCKSZ as usize) })
    }

    unsafe fn header(self) -> *const pg_sys::PageHeaderData {
        self.0.cast()
    }

    unsafe fn opaque(self) -> *const PageOpaque {
        // SAFETY: pd_special is where it begins.
        unsafe { self.0.add((*self.header()).pd_special as usize).cast() }
    }

    unsafe fn is_rightmost(self) -> bool {
        // SAFETY: the page is a btree's.
        unsafe { (*self.opaque()).next == 0 }
    }

    /// The first entry that is a row's.
    unsafe fn first(self) -> u16 {
        // SAFETY: the page is a btree's.
        if unsafe { self.is_rightmost() } { HIGH_KEY } else { HIGH_KEY + 1 }
    }

    /// The number of entries, with the high key.
    unsafe fn entries(self) -> u16 {
        let header = std::mem::offset_of!(pg_sys::PageHeaderData, pd_linp);
        // SAFETY: the line pointers end at pd_lower.
        let lower = unsafe { (*self.header()).pd_lower } as usize;
        (lower.saturating_sub(header) / size_of::<pg_sys::ItemIdData>()) as u16
    }

    /// Where the rows of an entry are; none if it is known that there are none.
    unsafe fn places<'a>(self, entry: u16) -> &'a [pg_sys::ItemPointerData] {
        // SAFETY: the entry is within the page; a posting list begins where the block number of its
        // tuple's place says.
        unsafe {
            let line = (*self.header()).pd_linp.as_ptr().add(entry as usize - 1);
            if (*line).lp_flags() == pg_sys::LP_DEAD {
                return &[];
            }
            let tuple = self.0.add((*line).lp_off() as usize).cast::<pg_sys::IndexTupleData>();
            let place = &raw const (*tuple).t_tid;
            if (*tuple).t_info & POSTING_LIST == 0 {
                return std::slice::from_raw_parts(place, 1);
            }
            let list = tuple.byte_add(block_number(&*place) as usize).cast();
            std::slice::from_raw_parts(list, ((*place).ip_posid & POSTING_COUNT) as usize)
        }
    }
}
