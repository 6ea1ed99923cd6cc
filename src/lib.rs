//! idem: idempotency keys for PostgreSQL.
//!
//! A call walks through four rooms: [`functions`] decodes the SQL arguments, [`idempotency`] asks
//! `idem_core` what the stored record means and carries that out, [`storage`] reads and writes
//! the records, [`pg`] is the only place that talks to PostgreSQL. See ARCHITECTURE.md.

mod contention;
mod filters;
mod functions;
mod idempotency;
mod leases;
mod locks;
mod operations;
mod pg;
mod purge;
mod ring;
mod settings;
mod statistics;
mod storage;

pgrx::pg_module_magic!(name, version);

// What `cargo pgrx` installs is this very file; `make install` copies it.
pgrx::extension_sql_file!("../sql/idem.sql", name = "idem", finalize);

/// Called by PostgreSQL when the library is loaded.
#[pgrx::pg_guard]
pub extern "C-unwind" fn _PG_init() {
    settings::define();
    #[cfg(any(feature = "pg15", feature = "pg16"))]
    pg::shmem::reserve();
}
