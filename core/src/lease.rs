//! What a lease lock's row means, at a moment; and the fence.
//!
//! A lease lock is one row per name that stays when the lock is free, because it carries the
//! **fence**: a number that is strictly increasing per name, which an outside resource can use to
//! refuse a holder that was overtaken. It is `max(last fence of the name, clock in µs) + 1` and
//! not a sequence: the clock keeps it rising across a restored dump, a promoted standby or a removed
//! row, the last fence keeps it rising within a microsecond, or when the clock is set back.
//!
//! Unlike a claim on a key, whose holder may still complete when its lease is over, a lock is lost at
//! the end of its lease, whether or not somebody took it.

use crate::{Moment, Token};

/// A lock's row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease {
    /// `None`: unlocked.
    pub token: Option<Token>,
    pub fence: i64,
    /// End of the last lease.
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

/// What somebody who wants the lock meets at the moment `now`, its row being `stored`.
pub fn take(stored: Option<&Lease>, now: Moment) -> Take {
    match stored {
        Some(Lease { token: Some(_), expires_at, .. }) if now < *expires_at => {
            Take::Held { lease_end: *expires_at }
        }
        stored => Take::Free { fence: next_fence(stored.map(|lease| lease.fence), now) },
    }
}

/// Whether `token` holds the lock at the moment `now`.
pub fn holds(stored: Option<&Lease>, token: &Token, now: Moment) -> bool {
    stored.is_some_and(|lease| lease.token == Some(*token) && now < lease.expires_at)
}

fn next_fence(last: Option<i64>, now: Moment) -> i64 {
    last.unwrap_or(now).max(now).saturating_add(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Moment = 1_000;
    const TOKEN: Token = [1; 16];
    const OTHER: Token = [2; 16];

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
            assert_eq!(take(stored.as_ref(), NOW), expected, "{stored:?}");
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
            let Take::Free { fence } = take(Some(&stored), now) else { panic!() };
            assert!(fence > last && fence > now, "{last} at {now} gave {fence}");
        }
    }
}
