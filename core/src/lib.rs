//! What idem decides, without PostgreSQL in it.
//!
//! Everything here is a pure function or a plain data structure: it reads no clock, no table and no
//! setting, so it is tested exhaustively and without a server. The extension around it (`../src`)
//! turns SQL calls into these types and carries out what they decide.
//!
//! Times are microseconds since PostgreSQL's epoch (2000-01-01 UTC), durations are microseconds.

pub mod canonical;
pub mod decision;
pub mod duration;
pub mod error;
pub mod filter;
pub mod held;
pub mod identity;
pub mod lease;
pub mod limits;
pub mod parts;
pub mod ring;
pub mod tally;

/// A moment: microseconds since 2000-01-01 00:00 UTC, as in PostgreSQL's `timestamptz`.
pub type Moment = i64;

/// A length of time in microseconds.
pub type Micros = i64;

/// The secret that proves a claim: the 16 bytes of a version 4 UUID.
pub type Token = [u8; 16];

/// SHA-256 of the fingerprint a caller gave; the fingerprint itself is never kept.
pub type Fingerprint = [u8; 32];
