//! What a lease lock's row means, at a moment; and the fence.
//!
//! A lease lock is one row per name that stays when the lock is free, because it carries the
//! **fence**: a number that is strictly increasing per name, which an outside resource can use to
//! refuse a holder that was overtaken. It is `max(last fence of the name, floor, clock in µs) + 1` and
//! not a sequence: the clock keeps it rising across a restored dump or a promoted standby, the last
//! fence keeps it rising within a microsecond, or when the clock is set back. The row of a name that
//! is long idle is removed; the *floor*, the highest fence of all that were, then stands for it.
//!
//! Unlike a claim on a key, whose holder may still complete when its lease is over, a lock is lost at
//! the end of its lease, whether or not somebody took it.

use crate::{Micros, Moment, Token};

/// A lock's row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease {
    /// `None`: unlocked.
    pub token: Option<Token>,
    pub fence: i64,
    /// End of the last lease: as it was given, or when it was unlocked.
    pub expires_at: Moment,
}

/// What somebody who wants the lock meets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Take {
    /// It is free: take it with this fence.
    Free { fence: i64 },
    /// It is held until then.
    Held { lease_end: Moment },
}

/// What somebody who wants the lock meets at the moment `now`, its row being `stored`. `floor` is at least the
/// fence of a row that was removed; it is asked for only where there is no row.
pub fn take<E>(
    stored: Option<&Lease>,
    floor: impl FnOnce() -> Result<i64, E>,
    now: Moment,
) -> Result<Take, E> {
    let last = match stored {
        Some(Lease { token: Some(_), expires_at, .. }) if now < *expires_at => {
            return Ok(Take::Held { lease_end: *expires_at });
        }
        Some(lease) => lease.fence,
        None => floor()?,
    };
    Ok(Take::Free { fence: last.max(now).saturating_add(1) })
}

/// Whether the row at the moment `now` carries nothing but its fence, and has for `idle` (above 0).
pub fn is_idle(stored: &Lease, idle: Micros, now: Moment) -> bool {
    stored.expires_at <= now - idle
}

/// Whether `token` holds the lock at the moment `now`.
pub fn holds(stored: Option<&Lease>, token: &Token, now: Moment) -> bool {
    stored.is_some_and(|lease| lease.token == Some(*token) && now < lease.expires_at)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Moment = 1_000;
    const TOKEN: Token = [1; 16];
    const OTHER: Token = [2; 16];

    fn no_floor() -> Result<i64, ()> {
        Ok(0)
    }

    fn lease(token: Option<Token>, expires_at: Moment) -> Option<Lease> {
        Some(Lease { token, fence: 7, expires_at })
    }

    #[test]
    fn only_an_unexpired_lease_is_in_the_way() {
        let free = Take::Free { fence: NOW + 1 };
        for (stored, expected) in [
            (None, free),
            (lease(None, NOW + 1), free),
            (lease(None, NOW - 1), free),
            (lease(Some(TOKEN), NOW - 1), free),
            (lease(Some(TOKEN), NOW), free),
            (lease(Some(TOKEN), NOW + 1), Take::Held { lease_end: NOW + 1 }),
        ] {
            assert_eq!(take(stored.as_ref(), no_floor, NOW), Ok(expected), "{stored:?}");
        }
    }

    #[test]
    fn only_its_token_holds_and_only_until_its_end() {
        for (stored, expected) in [
            (None, false),
            (lease(None, NOW + 1), false),
            (lease(Some(OTHER), NOW + 1), false),
            (lease(Some(TOKEN), NOW + 1), true),
            (lease(Some(TOKEN), NOW), false),
        ] {
            assert_eq!(holds(stored.as_ref(), &TOKEN, NOW), expected, "{stored:?}");
        }
    }

    #[test]
    fn the_fence_rises_even_if_the_clock_does_not() {
        for (last, now) in [(NOW, NOW), (NOW + 5, NOW), (NOW - 5, NOW), (NOW, 0)] {
            let stored = Lease { token: None, fence: last, expires_at: 0 };
            for (stored, floor) in [(Some(&stored), 0), (None, last)] {
                let Ok(Take::Free { fence }) = take(stored, || Ok::<_, ()>(floor), now) else {
                    panic!()
                };
                assert!(fence > last && fence > now, "{last} at {now} gave {fence}");
            }
        }
    }

    #[test]
    fn a_row_is_idle_some_time_after_its_end() {
        for (expires_at, idle) in [(NOW - 100, true), (NOW - 99, false), (NOW + 1, false)] {
            for token in [None, Some(TOKEN)] {
                let lease = lease(token, expires_at).unwrap();
                assert_eq!(is_idle(&lease, 100, NOW), idle, "{lease:?}");
            }
        }
    }
}
