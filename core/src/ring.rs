//! The ring of segments that finished records are kept in: which is written to, until when, and which can be emptied.
//!
//! A segment becomes the current one for a *turn*. With the turn it gets a *bound*, which never changes: records that
//! expire by then are written to it, others elsewhere. Once the bound has passed, everything in the segment has expired,
//! and it is emptied as a whole, without looking at a single record.
//!
//! Turns are numbered, and each takes the next segment around the ring that is empty: numbers are left out where one is not yet,
//! because it began when `idem.ttl` was longer or could not be emptied. That makes the rules for readers and writers
//! weak: a writer with an old idea of the ring writes to a segment whose bound still holds for it, and readers look
//! into every segment that is not empty, whatever the ring says.

use crate::{Micros, Moment};

/// How many segments there are. A segment is current for half a ttl and emptied a ttl and a quarter later: that
/// keeps four in use, one being next. The others serve busy times, and give time when a segment cannot be emptied (a long
/// `pg_dump`).
pub const SEGMENTS: usize = 8;

/// A current segment of more bytes makes way for the next, so that the index being written stays small: a
/// good million records.
pub const LARGE: u64 = 256 << 20;

/// A segment makes way for its size only if this many are empty: what turns by age need until the first
/// is emptied.
pub const SPARE: usize = 5;

/// A segment's time as the current one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    pub number: i64,
    pub started_at: Moment,
    /// Everything written in this turn expires by then.
    pub bound: Moment,
}

/// Whose turn has that number.
pub fn segment_of(number: i64) -> usize {
    number.rem_euclid(SEGMENTS as i64) as usize
}

impl Turn {
    /// Whose turn it is.
    pub fn segment(&self) -> usize {
        segment_of(self.number)
    }

    /// Whether a record that expires then may be written.
    pub fn takes(&self, expires_at: Moment) -> bool {
        expires_at <= self.bound
    }

    /// Whether everything written in this turn has expired.
    pub fn is_over(&self, now: Moment) -> bool {
        self.bound <= now
    }
}

/// The last turn of each segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ring([Option<Turn>; SEGMENTS]);

impl FromIterator<Turn> for Ring {
    fn from_iter<T: IntoIterator<Item = Turn>>(turns: T) -> Ring {
        let mut ring = Ring::default();
        for turn in turns {
            let last = &mut ring.0[turn.segment()];
            if last.is_none_or(|last| last.number < turn.number) {
                *last = Some(turn);
            }
        }
        ring
    }
}

impl Ring {
    /// The last turn of a segment.
    pub fn last(&self, segment: usize) -> Option<Turn> {
        self.0[segment]
    }

    /// The turn that goes on.
    pub fn current(&self) -> Option<Turn> {
        self.0.iter().flatten().copied().max_by_key(|turn| turn.number)
    }

    /// All segments, those that were written last first: most duplicates come soon.
    pub fn newest_first(&self) -> [usize; SEGMENTS] {
        let mut segments = std::array::from_fn(|segment| segment);
        segments.sort_by_key(|segment| std::cmp::Reverse(self.0[*segment].map(|turn| turn.number)));
        segments
    }

    /// The turn to go on with, if it is time: half of `ttl` has passed, a record of that ttl would outlive the
    /// bound, or the current segment holds so many `bytes` that it makes way for another. The next one is `empty`.
    pub fn next(
        &self,
        ttl: Micros,
        bytes: u64,
        empty: [bool; SEGMENTS],
        now: Moment,
    ) -> Option<Turn> {
        let last = self.current().map_or(0, |turn| turn.number);
        if let Some(current) = self.current() {
            let old = now - current.started_at >= ttl / 2;
            let spare = empty.iter().filter(|empty| **empty).count();
            let large = bytes >= LARGE && spare >= SPARE;
            if !(old || large || !current.takes(now + ttl)) {
                return None;
            }
        }
        let number =
            (last + 1..last + SEGMENTS as i64).find(|number| empty[segment_of(*number)])?;
        Some(Turn { number, started_at: now, bound: now + ttl * 7 / 4 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Micros = 1_000;

    fn ring(turns: &[(i64, Moment)]) -> Ring {
        let turn = |&(number, started_at)| Turn { number, started_at, bound: started_at + 1_750 };
        turns.iter().map(turn).collect()
    }

    #[test]
    fn the_current_turn_is_the_highest_whatever_the_order() {
        let ring = ring(&[(9, 400), (0, 0), (8, 300), (1, 100)]);
        assert_eq!(ring.current().map(|turn| turn.number), Some(9));
        assert_eq!(ring.last(0).map(|turn| turn.number), Some(8), "0 had the segment before");
        assert_eq!(ring.last(1).map(|turn| turn.number), Some(9));
        assert_eq!(ring.last(2), None);
        assert_eq!(ring.newest_first()[..2], [1, 0]);
        let mut all = ring.newest_first();
        all.sort_unstable();
        assert_eq!(all, [0, 1, 2, 3, 4, 5, 6, 7]);
    }

    #[test]
    fn it_moves_on_by_age_by_size_and_when_records_would_outlive_the_bound() {
        let ring = ring(&[(5, 0)]);
        for (ttl, bytes, empty, now, moves) in [
            (TTL, 0, 7, 499, false),
            (TTL, 0, 1, 500, true),
            (TTL, 0, 0, 500, false),
            (TTL, LARGE - 1, 7, 1, false),
            (TTL, LARGE, SPARE, 1, true),
            (TTL, LARGE, SPARE - 1, 1, false),
            // A lower ttl makes a turn old sooner; with a higher one, records no longer fit.
            (10, 0, 7, 5, true),
            (1_750, 0, 7, 0, false),
            (1_751, 0, 7, 0, true),
        ] {
            let next = ring.next(ttl, bytes, empty_from(6, empty), now);
            assert_eq!(next.is_some(), moves, "{ttl} {bytes} {empty} {now}");
            if let Some(turn) = next {
                assert_eq!((turn.number, turn.started_at), (6, now));
                assert!(turn.takes(now + ttl + ttl / 2), "a record at the end of its turn fits");
            }
        }
        assert_eq!(
            Ring::default().next(TTL, 0, empty_from(0, 8), 7).map(|turn| turn.number),
            Some(1)
        );
    }

    /// So many segments in a row are empty.
    fn empty_from(first: usize, count: usize) -> [bool; SEGMENTS] {
        let mut empty = [false; SEGMENTS];
        (first..first + count).for_each(|segment| empty[segment % SEGMENTS] = true);
        empty
    }

    /// A segment that waits for a bound of long ago, when the ttl was longer, does not hold up the others.
    #[test]
    fn segments_that_are_not_empty_are_left_out() {
        let next = |empty| ring(&[(6, 0), (8, 0)]).next(TTL, 0, empty, 500).map(|turn| turn.number);
        assert_eq!(next(empty_from(1, 6)), Some(9));
        assert_eq!(next(empty_from(3, 2)), Some(11));
        assert_eq!(next(empty_from(7, 2)), Some(15), "the current one, 0, does not follow itself");
        assert_eq!(next(empty_from(0, 1)), None);
    }

    /// Purged four times in half a ttl, the ring never runs out of segments, nor a record of that ttl out of its bound.
    #[test]
    fn a_ring_that_is_purged_always_has_room() {
        for large_until in [0, 400, 5_000] {
            let mut ring = ring(&[(0, 0)]);
            let mut full = [false; SEGMENTS];
            for now in (0..20_000).step_by(125) {
                let current = ring.current().unwrap();
                assert!(current.takes(now + TTL), "at {now}: {ring:?}");
                full[current.segment()] = true;
                for (segment, full) in full.iter_mut().enumerate() {
                    *full &= !ring.last(segment).is_some_and(|turn| turn.is_over(now));
                }
                let empty = full.map(|full| !full);
                let bytes = if now < large_until { LARGE } else { 0 };
                if let Some(next) = ring.next(TTL, bytes, empty, now) {
                    assert!(!full[next.segment()], "at {now}: {ring:?}");
                    let turns = (0..SEGMENTS).filter_map(|segment| ring.last(segment));
                    ring = turns.chain([next]).collect();
                }
            }
        }
    }
}
