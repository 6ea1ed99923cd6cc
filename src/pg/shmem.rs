//! Counters that all connections share: where their memory comes from, and adding to them.
//!
//! The memory is a fixed table with a row of counters for each database, which gets its row when it
//! first counts and keeps it until the server restarts. Adding is one atomic instruction; no lock is
//! taken anywhere. When the table is full, further databases are not counted.
//!
//! From PostgreSQL 17 on the table is made when it is first needed. Before, only a library loaded by
//! `shared_preload_libraries` can have shared memory: without that nothing is counted.
//!
//! **Nothing here fails a caller.** A connection attaches with its first count, within a
//! subtransaction; if that does not work it goes on without counting. Afterwards there is nothing
//! left that can fail, so adding is safe where PostgreSQL permits no error: after COMMIT.

use pgrx::pg_sys;
use std::cell::Cell;
use std::ffi::CStr;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64};

/// How many counters a database has.
pub const COUNTERS: usize = 11;

/// How many databases are counted between two starts of the server, dropped ones included.
const DATABASES: usize = 1024;

/// Raised with every change of what lies in the memory or what it means: connections that run another
/// version of the library must not count into the same place.
const LAYOUT: u32 = 1;

/// What the memory is called: with its layout, so that while connections of two versions live, each
/// counts into its own.
const NAME: &CStr = c"idem statistics 1";

const _: () = assert!(*NAME.to_bytes().last().unwrap() == b'0' + LAYOUT as u8);

#[repr(C)]
struct Table {
    layout: AtomicU32,
    databases: [Database; DATABASES],
}

/// The counters of one database; aligned so that two databases share no cache line.
#[repr(C, align(128))]
pub struct Database {
    /// 0: not in use.
    oid: AtomicU32,
    since: AtomicI64,
    counts: [AtomicU64; COUNTERS],
}

/// Why nothing is counted here.
#[derive(Clone, Copy)]
pub enum Missing {
    #[cfg(any(feature = "pg15", feature = "pg16"))]
    NotPreloaded,
    /// The memory could not be had.
    #[cfg(any(feature = "pg17", feature = "pg18"))]
    NoMemory,
    OtherLayout,
    Full,
}

thread_local! {
    /// The counters of this connection's database, or why there are none, once that is known.
    static ATTACHED: Cell<Option<Result<&'static Database, Missing>>> = const { Cell::new(None) };
}

/// The counters of this database. Called within a transaction.
pub fn database() -> Result<&'static Database, Missing> {
    ATTACHED.get().unwrap_or_else(|| {
        let attached = attach();
        ATTACHED.set(Some(attached));
        attached
    })
}

fn attach() -> Result<&'static Database, Missing> {
    let table = table()?;
    if table.layout.load(Relaxed) != LAYOUT {
        return Err(Missing::OtherLayout);
    }
    // SAFETY: a plain global, set once when the backend starts.
    let oid = unsafe { pg_sys::MyDatabaseId }.to_u32();
    let (before, from) = table.databases.split_at(oid as usize % DATABASES);
    let owned = from.iter().chain(before).find(|database| {
        let owner = database.oid.compare_exchange(0, oid, Relaxed, Relaxed);
        owner.is_ok() || owner == Err(oid)
    });
    let database = owned.ok_or(Missing::Full)?;
    // By whoever comes first, so that nobody reads a row that counts from no moment.
    let _ = database.since.compare_exchange(0, super::now(), Relaxed, Relaxed);
    Ok(database)
}

/// Adds to the counters of this database, if it is attached. Cannot fail.
pub fn add(counts: &[u64; COUNTERS]) {
    if let Some(Ok(database)) = ATTACHED.get() {
        for (counter, count) in database.counts.iter().zip(counts) {
            if *count > 0 {
                counter.fetch_add(*count, Relaxed);
            }
        }
    }
}

impl Database {
    /// Counts one more.
    pub fn count(&self, counter: usize) {
        self.counts[counter].fetch_add(1, Relaxed);
    }

    /// All counters, and the moment since which they count.
    pub fn read(&self) -> ([u64; COUNTERS], idem_core::Moment) {
        (self.counts.each_ref().map(|count| count.load(Relaxed)), self.since.load(Relaxed))
    }

    /// Starts from 0, now.
    pub fn reset(&self) {
        for count in &self.counts {
            count.store(0, Relaxed);
        }
        self.since.store(super::now(), Relaxed);
    }
}

/// Fills new memory.
///
/// # Safety
/// `place` is as large as a [`Table`], aligned as one, and nobody else's yet.
unsafe fn fill(place: *mut Table) {
    // SAFETY: a table of zeros is valid: all of it is atomic integers.
    unsafe {
        place.write_bytes(0, 1);
        (*place).layout.store(LAYOUT, Relaxed);
    }
}

#[cfg(any(feature = "pg17", feature = "pg18"))]
fn table() -> Result<&'static Table, Missing> {
    unsafe extern "C-unwind" fn initialize(place: *mut std::ffi::c_void) {
        // SAFETY: PostgreSQL calls this with the new memory, which starts at a page.
        unsafe { fill(place.cast()) }
    }
    let made = super::trap::in_subtransaction(|| {
        let mut found = false;
        // SAFETY: the memory stays mapped until the process ends.
        unsafe {
            pg_sys::GetNamedDSMSegment(
                NAME.as_ptr(),
                size_of::<Table>(),
                Some(initialize),
                &mut found,
            )
        }
    });
    // SAFETY: the memory is a table that `initialize` filled, in this process or another.
    made.map(|place| unsafe { &*place.cast::<Table>() }).map_err(|_| Missing::NoMemory)
}

#[cfg(any(feature = "pg15", feature = "pg16"))]
pub use preloaded::reserve;
#[cfg(any(feature = "pg15", feature = "pg16"))]
use preloaded::table;

/// The memory is reserved when the server starts, by a library that is loaded then.
#[cfg(any(feature = "pg15", feature = "pg16"))]
mod preloaded {
    use super::{Missing, NAME, Table, fill};
    use pgrx::pg_sys;
    use std::cell::Cell;
    use std::ptr::null_mut;

    type Hook = Option<unsafe extern "C-unwind" fn()>;

    thread_local! {
        /// Set in the postmaster, inherited by every process it forks.
        static TABLE: Cell<*mut Table> = const { Cell::new(null_mut()) };
        /// The hooks of libraries that were loaded before.
        static REQUEST: Cell<Hook> = const { Cell::new(None) };
        static STARTUP: Cell<Hook> = const { Cell::new(None) };
    }

    /// Called when the library is loaded: has the server reserve the memory if it is starting.
    pub fn reserve() {
        // SAFETY: plain globals of the postmaster; the hooks are functions of this library, which is
        // never unloaded.
        unsafe {
            if pg_sys::process_shared_preload_libraries_in_progress {
                REQUEST.set(pg_sys::shmem_request_hook);
                STARTUP.set(pg_sys::shmem_startup_hook);
                pg_sys::shmem_request_hook = Some(request);
                pg_sys::shmem_startup_hook = Some(startup);
            }
        }
    }

    unsafe extern "C-unwind" fn request() {
        // SAFETY: PostgreSQL calls this when memory may be requested; so may the others.
        unsafe {
            if let Some(before) = REQUEST.get() {
                before();
            }
            pg_sys::RequestAddinShmemSpace(size_of::<Table>());
        }
    }

    /// Called by the postmaster alone, at its start and after a crash, so no lock is needed.
    unsafe extern "C-unwind" fn startup() {
        // SAFETY: the memory was requested; it is aligned to a cache line of 128 bytes.
        unsafe {
            if let Some(before) = STARTUP.get() {
                before();
            }
            let mut found = false;
            let table = pg_sys::ShmemInitStruct(NAME.as_ptr(), size_of::<Table>(), &mut found);
            fill(table.cast());
            TABLE.set(table.cast());
        }
    }

    pub fn table() -> Result<&'static Table, Missing> {
        // SAFETY: the memory lasts as long as the process.
        unsafe { TABLE.get().as_ref() }.ok_or(Missing::NotPreloaded)
    }
}
