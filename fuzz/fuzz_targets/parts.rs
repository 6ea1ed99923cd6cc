//! Different lists of parts make different keys and fingerprints.
#![no_main]

use idem_core::parts::{compose_key, fingerprint};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|lists: (Vec<Vec<u8>>, Vec<Vec<u8>>)| {
    let (a, b) = lists;
    if a.is_empty() || b.is_empty() {
        return;
    }
    fn slices(list: &[Vec<u8>]) -> impl Iterator<Item = &[u8]> {
        list.iter().map(Vec::as_slice)
    }
    assert_eq!(compose_key(slices(&a)) == compose_key(slices(&b)), a == b);
    assert_eq!(fingerprint(slices(&a)) == fingerprint(slices(&b)), a == b);
});
