//! What a record means, at a moment, for a request.
//!
//! This is the heart of idem: given what is stored under a key (or nothing), the request and the
//! clock, it says what `idem_begin` answers. Who may act on the answer is a matter of locks: only a
//! caller who holds the key's lock may take [`Decision::Acquire`] at its word; for one who looked
//! without it, it says no more than "nothing live was seen".

use crate::{Fingerprint, Moment};

/// What is stored under a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    pub fingerprint: Option<Fingerprint>,
    pub state: State,
}

/// Where a stored record stands. The claim of an open transaction is not stored at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Held on a lease until `lease_end`; from then on anyone may take over.
    Claimed { attempt: i32, lease_end: Moment },
    /// Finished; counts until `expires_at`, from then on as absent.
    Completed { expires_at: Moment },
}

/// What a caller of `idem_begin` brings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Request {
    pub fingerprint: Option<Fingerprint>,
}

/// What `idem_begin` is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Nobody holds the key: claim it as this attempt.
    Acquire { attempt: i32 },
    /// Finished before: answer with what is stored.
    Replay,
    /// Held on a lease until then.
    InProgress { lease_end: Moment },
    /// The key belongs to a different request.
    Mismatch,
}

/// Decides what `request` meets at the moment `now`, the record under its key being `record`.
pub fn decide(record: Option<&Record>, request: &Request, now: Moment) -> Decision {
    let Some(record) = record else {
        return Decision::Acquire { attempt: 1 };
    };
    if let State::Completed { expires_at } = record.state
        && expires_at <= now
    {
        return Decision::Acquire { attempt: 1 };
    }
    if !same_request(record.fingerprint, request.fingerprint) {
        return Decision::Mismatch;
    }
    match record.state {
        State::Completed { .. } => Decision::Replay,
        State::Claimed { lease_end, .. } if now < lease_end => Decision::InProgress { lease_end },
        State::Claimed { attempt, .. } => Decision::Acquire { attempt: attempt.saturating_add(1) },
    }
}

/// Whether two fingerprints can belong to one request: a missing one is not compared.
pub fn same_request(stored: Option<Fingerprint>, given: Option<Fingerprint>) -> bool {
    match (stored, given) {
        (Some(stored), Some(given)) => stored == given,
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Moment = 1_000;
    const FINGERPRINTS: [Option<Fingerprint>; 3] = [None, Some([1; 32]), Some([2; 32])];

    /// Every state, before, at and after its end, against every pair of fingerprints: the answers
    /// are written out from the contract, not computed the way the code does.
    #[test]
    fn every_state_times_every_fingerprint() {
        let states = [
            (None, "absent"),
            (Some(State::Claimed { attempt: 3, lease_end: NOW + 1 }), "held"),
            (Some(State::Claimed { attempt: 3, lease_end: NOW }), "lease over"),
            (Some(State::Claimed { attempt: 3, lease_end: NOW - 1 }), "lease over"),
            (Some(State::Completed { expires_at: NOW + 1 }), "completed"),
            (Some(State::Completed { expires_at: NOW }), "expired"),
            (Some(State::Completed { expires_at: NOW - 1 }), "expired"),
        ];
        let mut checked = 0;
        for (state, name) in states {
            for stored in FINGERPRINTS {
                for given in FINGERPRINTS {
                    let record = state.map(|state| Record { fingerprint: stored, state });
                    let differs = matches!((stored, given), (Some(a), Some(b)) if a != b);
                    let expected = match (name, differs) {
                        ("absent" | "expired", _) => Decision::Acquire { attempt: 1 },
                        (_, true) => Decision::Mismatch,
                        ("held", false) => Decision::InProgress { lease_end: NOW + 1 },
                        ("lease over", false) => Decision::Acquire { attempt: 4 },
                        ("completed", false) => Decision::Replay,
                        _ => unreachable!(),
                    };
                    let request = Request { fingerprint: given };
                    assert_eq!(
                        decide(record.as_ref(), &request, NOW),
                        expected,
                        "{name}, stored {stored:?}, given {given:?}"
                    );
                    checked += 1;
                }
            }
        }
        assert_eq!(checked, 7 * 9);
    }

    #[test]
    fn attempts_do_not_overflow() {
        let record =
            Record { fingerprint: None, state: State::Claimed { attempt: i32::MAX, lease_end: 0 } };
        assert_eq!(
            decide(Some(&record), &Request::default(), NOW),
            Decision::Acquire { attempt: i32::MAX }
        );
    }
}
