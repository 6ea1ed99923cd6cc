//! What a record means, at a moment, for a request.
//!
//! This is the heart of idem: given what is stored under a key (or nothing), the request and the
//! clock, it says what `idem_begin` answers. Who may act on the answer is a matter of locks: only a
//! caller who holds the key's lock may take [`Decision::Acquire`] at its word; for one who looked
//! without it, it says no more than "nothing live was seen".

use crate::{Fingerprint, Moment};

/// What is stored under a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record<'a> {
    pub fingerprint: Option<Fingerprint>,
    pub owner: Option<&'a [u8]>,
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request<'a> {
    pub fingerprint: Option<Fingerprint>,
    pub owner: Option<&'a [u8]>,
    /// Whether a lease that ran out may be taken over.
    pub takeover: bool,
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
    /// The record belongs to somebody else, who it is not shown to.
    Denied,
    /// A lease ran out and the caller does not want to take over.
    Abandoned,
}

/// Decides what `request` meets at the moment `now`, the record under its key being `record`.
///
/// `authorized` is what an authorizer says if it is asked ([`asks_authorizer`]); without one it is
/// false.
pub fn decide(
    record: Option<&Record>,
    request: &Request,
    authorized: bool,
    now: Moment,
) -> Decision {
    let Some(record) = record.filter(|record| counts(record, now)) else {
        return Decision::Acquire { attempt: 1 };
    };
    let own = same_owner(record.owner, request.owner);
    let lease_over = matches!(record.state, State::Claimed { lease_end, .. } if lease_end <= now);
    // Others may be allowed to see a record, but only its own owner goes on with its work.
    if !own && (!authorized || lease_over) {
        return Decision::Denied;
    }
    if !same_request(record.fingerprint, request.fingerprint) {
        return Decision::Mismatch;
    }
    match record.state {
        State::Completed { .. } => Decision::Replay,
        State::Claimed { lease_end, .. } if !lease_over => Decision::InProgress { lease_end },
        State::Claimed { .. } if !request.takeover => Decision::Abandoned,
        State::Claimed { attempt, .. } => Decision::Acquire { attempt: attempt.saturating_add(1) },
    }
}

/// Whether the record is anything but absent at the moment `now`.
pub fn counts(record: &Record, now: Moment) -> bool {
    !matches!(record.state, State::Completed { expires_at } if expires_at <= now)
}

/// Whether two fingerprints can belong to one request: a missing one is not compared.
pub fn same_request(stored: Option<Fingerprint>, given: Option<Fingerprint>) -> bool {
    match (stored, given) {
        (Some(stored), Some(given)) => stored == given,
        _ => true,
    }
}

/// Whether a record's owner and a caller can be the same: a missing one is not compared.
pub fn same_owner(stored: Option<&[u8]>, given: Option<&[u8]>) -> bool {
    match (stored, given) {
        (Some(stored), Some(given)) => stored == given,
        _ => true,
    }
}

/// Whether the answer depends on an authorizer: a record that counts, of another owner.
pub fn asks_authorizer(record: Option<&Record>, owner: Option<&[u8]>, now: Moment) -> bool {
    record.is_some_and(|record| counts(record, now) && !same_owner(record.owner, owner))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Moment = 1_000;
    const FINGERPRINTS: [Option<Fingerprint>; 3] = [None, Some([1; 32]), Some([2; 32])];
    const OWNERS: [Option<&[u8]>; 4] = [None, Some(b""), Some(b"a"), Some(b"b")];

    /// Every state, before, at and after its end, against every pair of fingerprints and of owners,
    /// each with and without takeover and authorization. The answers are written out from the
    /// contract, not computed the way the code does.
    #[test]
    fn every_state_times_every_request() {
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
        let mut check = |(state, name): (Option<State>, &str),
                         fingerprints,
                         owners,
                         takeover,
                         authorized| {
            let (stored_print, given_print): (Option<Fingerprint>, Option<Fingerprint>) =
                fingerprints;
            let (stored_owner, given_owner): (Option<&[u8]>, Option<&[u8]>) = owners;
            let record =
                state.map(|state| Record { fingerprint: stored_print, owner: stored_owner, state });
            let request = Request { fingerprint: given_print, owner: given_owner, takeover };
            let differs = matches!((stored_print, given_print), (Some(a), Some(b)) if a != b);
            let other = matches!((stored_owner, given_owner), (Some(a), Some(b)) if a != b);
            let expected = match (name, other, authorized, differs, takeover) {
                ("absent" | "expired", ..) => Decision::Acquire { attempt: 1 },
                (_, true, false, ..) => Decision::Denied,
                ("lease over", true, ..) => Decision::Denied,
                (_, _, _, true, _) => Decision::Mismatch,
                ("held", ..) => Decision::InProgress { lease_end: NOW + 1 },
                ("lease over", _, _, _, true) => Decision::Acquire { attempt: 4 },
                ("lease over", _, _, _, false) => Decision::Abandoned,
                ("completed", ..) => Decision::Replay,
                _ => unreachable!(),
            };
            let decided = decide(record.as_ref(), &request, authorized, NOW);
            assert_eq!(decided, expected, "{name}, {record:?}, {request:?}, {authorized}");
            let asks = asks_authorizer(record.as_ref(), given_owner, NOW);
            assert_eq!(asks, other && !matches!(name, "absent" | "expired"), "{name}");
            checked += 1;
        };
        for state in states {
            for prints in FINGERPRINTS.iter().flat_map(|a| FINGERPRINTS.map(|b| (*a, b))) {
                for owners in OWNERS.iter().flat_map(|a| OWNERS.map(|b| (*a, b))) {
                    for (takeover, authorized) in
                        [(true, false), (true, true), (false, false), (false, true)]
                    {
                        check(state, prints, owners, takeover, authorized);
                    }
                }
            }
        }
        assert_eq!(checked, 7 * 9 * 16 * 4);
    }

    #[test]
    fn attempts_do_not_overflow() {
        let record = Record {
            fingerprint: None,
            owner: None,
            state: State::Claimed { attempt: i32::MAX, lease_end: 0 },
        };
        let request = Request { fingerprint: None, owner: None, takeover: true };
        let decided = decide(Some(&record), &request, false, NOW);
        assert_eq!(decided, Decision::Acquire { attempt: i32::MAX });
    }
}
