//! Which key is meant: the digest that stores and indexes it, and the tags that lock it.
//!
//! The digest is the first 16 bytes of
//! `SHA-256(domain ‖ len(scope) ‖ scope ‖ len(name) ‖ name)`: `domain` is one byte (1 for an
//! idempotency key, 2 for a lock), the lengths are 32-bit big-endian counts of
//! bytes, scope and name are UTF-8. Length prefixes make the encoding injective: no key reaches
//! another scope, whatever bytes it holds.
//!
//! Both tags are taken from the same hash, 78 bits each: the *key* tag from bytes 0 to 9, the *wake*
//! tag from bytes 16 to 25. Each is laid out as field2 = 4 bytes, field3 = 4 bytes, field4 =
//! `0x4000 | (2 bytes & 0x3FFF)`, all big-endian. PostgreSQL's own advisory locks have field4 = 1 or
//! 2, other extensions use small numbers; 0x4000 to 0x7FFF meets none of them and shows positive in
//! `pg_locks.objsubid`.
//!
//! Stored digests and the exclusion between servers of different versions depend on this: it is frozen by the
//! vectors in the tests below and never changes.

use crate::Fingerprint;
use sha2::{Digest, Sha256};

/// What kind of name an identity is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Domain {
    /// An idempotency key.
    Key = 1,
    /// The name of a lock.
    Lock = 2,
}

/// The part of a lock tag that comes from the hash (the database is added by the lock manager side).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tag {
    pub field2: u32,
    pub field3: u32,
    /// Always in 0x4000..=0x7FFF.
    pub field4: u16,
}

/// A name within a scope, as it is stored and locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    pub domain: Domain,
    /// What the unique index holds.
    pub digest: [u8; 16],
    /// Whoever claims, completes, releases or extends holds this tag.
    pub key_tag: Tag,
    /// Whoever sleeps until a lease ends holds this tag in share mode, to be found and woken.
    pub wake_tag: Tag,
}

impl Identity {
    /// Hashes `scope` and `name`, both given in UTF-8 (in a SQL_ASCII database: the bytes as they
    /// are).
    pub fn new(domain: Domain, scope: &[u8], name: &[u8]) -> Identity {
        let mut hash = Sha256::new();
        hash.update([domain as u8]);
        for part in [scope, name] {
            // A text value in PostgreSQL is shorter than 1 GB, so its length fits.
            hash.update((part.len() as u32).to_be_bytes());
            hash.update(part);
        }
        let hash: [u8; 32] = hash.finalize().into();
        Identity {
            domain,
            digest: std::array::from_fn(|i| hash[i]),
            key_tag: Tag::from_bytes(std::array::from_fn(|i| hash[i])),
            wake_tag: Tag::from_bytes(std::array::from_fn(|i| hash[16 + i])),
        }
    }
}

impl Tag {
    fn from_bytes(b: [u8; 10]) -> Tag {
        Tag {
            field2: u32::from_be_bytes([b[0], b[1], b[2], b[3]]),
            field3: u32::from_be_bytes([b[4], b[5], b[6], b[7]]),
            field4: 0x4000 | (u16::from_be_bytes([b[8], b[9]]) & 0x3FFF),
        }
    }
}

/// The stored form of a caller's fingerprint: SHA-256 of its bytes.
///
/// Callers may pass personal data or the request itself; what is stored tells nothing of it.
pub fn hash_fingerprint(given: &[u8]) -> Fingerprint {
    Sha256::digest(given).into()
}

/// A version 4 UUID (RFC 9562) made of 16 random bytes.
pub fn token_from_random(mut bytes: [u8; 16]) -> crate::Token {
    bytes[6] = (bytes[6] & 0x0F) | 0x40;
    bytes[8] = (bytes[8] & 0x3F) | 0x80;
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|b| format!("{b:02x}")).collect()
    }

    /// Computed once with another implementation of SHA-256 and frozen: if this test turns red, the
    /// change would orphan every stored record and void exclusion during a rolling upgrade.
    #[test]
    fn digests_and_tags_are_frozen() {
        type Vector = (Domain, &'static str, &'static str, &'static str, [u32; 3], [u32; 3]);
        let vectors: [Vector; 6] = include!("identity_vectors.in");
        for (domain, scope, name, digest, key, wake) in vectors {
            let id = Identity::new(domain, scope.as_bytes(), name.as_bytes());
            let fields = |t: Tag| [t.field2, t.field3, t.field4 as u32];
            assert_eq!(hex(&id.digest), digest, "digest of {scope:?} {name:?}");
            assert_eq!(fields(id.key_tag), key, "key tag of {scope:?} {name:?}");
            assert_eq!(fields(id.wake_tag), wake, "wake tag of {scope:?} {name:?}");
        }
    }

    #[test]
    fn the_boundary_between_scope_and_name_counts() {
        let parts = ["", "a", "b", "ab", "a:b", ":", "ba"];
        let mut seen = HashSet::new();
        for scope in parts {
            for name in parts {
                let id = Identity::new(Domain::Key, scope.as_bytes(), name.as_bytes());
                assert!(seen.insert(id.digest), "{scope:?} {name:?} meets another pair");
            }
        }
    }

    #[test]
    fn white_space_and_case_count() {
        let digest = |name: &str| Identity::new(Domain::Key, b"", name.as_bytes()).digest;
        assert_ne!(digest(" a"), digest("a"));
        assert_ne!(digest("a "), digest("a"));
        assert_ne!(digest("A"), digest("a"));
    }

    #[test]
    fn a_token_is_a_version_4_uuid() {
        for fill in [0x00, 0xFF] {
            let token = token_from_random([fill; 16]);
            assert_eq!(token[6] >> 4, 4);
            assert_eq!(token[8] >> 6, 2);
        }
    }

    proptest! {
        #[test]
        fn tags_stay_in_their_own_space(scope: Vec<u8>, name: Vec<u8>) {
            let id = Identity::new(Domain::Key, &scope, &name);
            prop_assert!((0x4000..=0x7FFF).contains(&id.key_tag.field4));
            prop_assert!((0x4000..=0x7FFF).contains(&id.wake_tag.field4));
        }
    }
}
