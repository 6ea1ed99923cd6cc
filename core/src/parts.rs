//! Several texts as one: the fingerprint of a list, and the composed key.
//!
//! Both are injective: different lists never meet, whatever the texts hold.
//!
//! **Fingerprint**: `SHA-256(3 ‖ len(part) ‖ part ‖ …)`: a byte 3, then for each part its length in
//! bytes as 32-bit big-endian number, and its bytes in UTF-8.
//!
//! **Composed key**: the parts joined by `:`, with each `\` in a part written as `\\` and each `:` as
//! `\:`. A part without either stands as it is, so keys stay readable: `('order', '7f3a')` is
//! `order:7f3a`. An unescaped `:` can only be a boundary, so the parts can be told again from the key;
//! and there is at least one part, so that nothing and one empty part do not meet.
//!
//! Stored fingerprints and keys depend on both: they are frozen by the vectors below.

use crate::Fingerprint;
use sha2::{Digest, Sha256};

/// The fingerprint of a list of texts, given in UTF-8.
pub fn fingerprint<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> Fingerprint {
    let mut hash = Sha256::new();
    hash.update([3]);
    for part in parts {
        // A text value in PostgreSQL is shorter than 1 GB, so its length fits.
        hash.update((part.len() as u32).to_be_bytes());
        hash.update(part);
    }
    hash.finalize().into()
}

/// One key of one or more texts. Any encoding in which the bytes of `:` and `\` are never part of
/// another character will do, as in all that PostgreSQL databases can have.
pub fn compose_key<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> Vec<u8> {
    let mut key = Vec::new();
    for (i, part) in parts.into_iter().enumerate() {
        if i > 0 {
            key.push(b':');
        }
        for byte in part {
            if matches!(byte, b':' | b'\\') {
                key.push(b'\\');
            }
            key.push(*byte);
        }
    }
    key
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn key(parts: &[&str]) -> String {
        String::from_utf8(compose_key(parts.iter().map(|part| part.as_bytes()))).unwrap()
    }

    #[test]
    fn keys_are_frozen() {
        assert_eq!(key(&["a"]), "a");
        assert_eq!(key(&["order", "7f3a"]), "order:7f3a");
        assert_eq!(key(&["a:b", "c"]), r"a\:b:c");
        assert_eq!(key(&["a", "b:c"]), r"a:b\:c");
        assert_eq!(key(&[r"a\", "b"]), r"a\\:b");
        assert_eq!(key(&["", ""]), ":");
        assert_eq!(key(&["é", "中"]), "é:中");
    }

    #[test]
    fn fingerprints_are_frozen() {
        let vectors: [(&[&str], &str); 5] = include!("parts_vectors.in");
        for (parts, expected) in vectors {
            let print = fingerprint(parts.iter().map(|part| part.as_bytes()));
            let hex: String = print.iter().map(|b| format!("{b:02x}")).collect();
            assert_eq!(hex, expected, "{parts:?}");
        }
    }

    /// The inverse of [`compose_key`], written apart from it.
    fn decompose(key: &[u8]) -> Vec<Vec<u8>> {
        let mut parts = vec![Vec::new()];
        let mut bytes = key.iter();
        while let Some(byte) = bytes.next() {
            match byte {
                b':' => parts.push(Vec::new()),
                b'\\' => parts.last_mut().unwrap().push(*bytes.next().unwrap()),
                byte => parts.last_mut().unwrap().push(*byte),
            }
        }
        parts
    }

    fn parts() -> impl Strategy<Value = Vec<Vec<u8>>> {
        let byte = prop_oneof![Just(b':'), Just(b'\\'), Just(b'a'), any::<u8>()];
        prop::collection::vec(prop::collection::vec(byte, 0..6), 1..5)
    }

    proptest! {
        #[test]
        fn the_parts_can_be_told_from_the_key(parts in parts()) {
            let key = compose_key(parts.iter().map(Vec::as_slice));
            prop_assert_eq!(decompose(&key), parts);
        }

        #[test]
        fn different_lists_have_different_fingerprints(a in parts(), b in parts()) {
            let of = |parts: &[Vec<u8>]| fingerprint(parts.iter().map(Vec::as_slice));
            prop_assert_eq!(of(&a) == of(&b), a == b);
        }
    }
}
