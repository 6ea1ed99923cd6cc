//! A filter: what surely is not among the records of a segment, told from a hundredth of its size.
//!
//! A blocked Bloom filter (Putze, Sanders, Singler: Cache-, Hash- and Space-Efficient Bloom Filters, 2007): a digest
//! chooses one block of 512 bits, and [`BITS`] bits in it; all are set if it was put in. So an answer costs
//! one access to memory. Digests are parts of SHA-256, so their bits serve as they are. A filter may say of one digest in some hundred that
//! it could be there though it is not; never the other way around.

/// The words of a block: 512 bits, a line of a processor's cache.
pub const BLOCK: usize = 8;

/// How many bits stand for a digest.
const BITS: u32 = 6;

/// How many bytes of records one block is for: some 45 records of the usual size, with 11 bits each.
const BYTES_A_BLOCK: u64 = 8192;

/// How many words a filter has for records of so many bytes.
pub fn words_for(bytes: u64) -> usize {
    bytes.div_ceil(BYTES_A_BLOCK).max(1) as usize * BLOCK
}

/// The block of a digest, and its bits there.
fn places(digest: &[u8; 16], words: usize) -> (usize, impl Iterator<Item = (usize, u64)>) {
    let digest = u128::from_be_bytes(*digest);
    let (high, low) = ((digest >> 64) as u64, digest as u64);
    let block = (u128::from(high) * (words / BLOCK) as u128) >> 64;
    let bits = (0..BITS).map(move |n| (low >> (9 * n)) as usize % (BLOCK * 64));
    (block as usize * BLOCK, bits.map(|bit| (bit / 64, 1 << (bit % 64))))
}

/// Puts a digest into the filter.
pub fn insert(words: &mut [u64], digest: &[u8; 16]) {
    let (block, bits) = places(digest, words.len());
    for (word, bit) in bits {
        words[block + word] |= bit;
    }
}

/// Whether the digest may have been put in; if not, it was not.
pub fn may_contain(words: &[u64], digest: &[u8; 16]) -> bool {
    let (block, mut bits) = places(digest, words.len());
    let block = &words[block..block + BLOCK];
    bits.all(|(word, bit)| block[word] & bit != 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::{Domain, Identity};

    fn digest(n: u32) -> [u8; 16] {
        Identity::new(Domain::Key, b"scope", &n.to_be_bytes()).digest
    }

    fn filled(records: u32, bytes_each: u64) -> Vec<u64> {
        let mut words = vec![0; words_for(u64::from(records) * bytes_each)];
        (0..records).for_each(|n| insert(&mut words, &digest(n)));
        words
    }

    #[test]
    fn what_was_put_in_is_never_denied() {
        for records in [0, 1, 2, 45, 100, 5_000] {
            for bytes_each in [1, 130, 180, 10_000] {
                let words = filled(records, bytes_each);
                assert!((0..records).all(|n| may_contain(&words, &digest(n))));
            }
        }
    }

    #[test]
    fn most_of_what_was_not_is_denied() {
        // Of the usual size, and the smallest there are.
        for (bytes_each, at_most) in [(180, 200), (130, 400)] {
            let words = filled(20_000, bytes_each);
            let wrong = (20_000..30_000).filter(|n| may_contain(&words, &digest(*n))).count();
            assert!((1..at_most).contains(&wrong), "{wrong} of 10,000 at {bytes_each} bytes");
        }
        assert!(!may_contain(&filled(0, 1), &digest(1)));
    }

    #[test]
    fn every_block_and_every_bit_is_used() {
        let words = filled(50_000, 8);
        assert!(words.len() > 10 * BLOCK);
        let (all, none) =
            words.iter().fold((0, !0), |(all, none), word| (all | word, none & !word));
        assert_eq!((all, none), (!0, 0), "each bit of a word is set somewhere, none is everywhere");
        assert!(words.chunks(BLOCK).all(|block| block.iter().any(|word| *word != 0)));
    }

    #[test]
    fn the_size_goes_with_the_records() {
        assert_eq!(words_for(0), BLOCK);
        assert_eq!(words_for(8_192), BLOCK);
        assert_eq!(words_for(8_193), 2 * BLOCK);
        assert_eq!(words_for(256 << 20) * 8, 2 << 20, "2 MB for a large segment");
    }
}
